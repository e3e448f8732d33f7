"""Bytes to frames, in sandboxed decoder processes: the pool that an API server holds, what a decoder process does, and
the formats it knows. Knows nothing of prompts or of the model."""
