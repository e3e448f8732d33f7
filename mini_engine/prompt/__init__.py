"""Conversations to tokens, and tokens to the answer's text. Knows nothing of HTTP, engines or how media are made."""
