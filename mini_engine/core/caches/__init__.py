"""What an engine keeps for later requests: it counts pages, blocks and tokens, and holds none of the bytes."""
