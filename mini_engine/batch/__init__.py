"""The engine from Python, and over files of requests. Knows nothing of how an engine works: it is a client of a server,
by default of one that it starts.
"""
