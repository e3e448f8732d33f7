"""Steps to tokens, in the worker of each rank. Decides nothing: the engine core decided what runs in a step."""
