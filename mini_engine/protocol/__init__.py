"""What clients send and receive: bodies, parts, tools, errors; and a request's clock. Knows nothing of HTTP."""
