"""The engines as an API server sees them: choice, requests, media store, tensors. Knows nothing of text or HTTP."""
