"""Requests to steps, in the engine cores. Knows nothing of tensors, tokenizers or HTTP; imports no torch."""
