"""Connections, requests and responses of the API servers. Knows nothing of templates, tokens or tensors."""
