"""From the command line to running processes: settings, start-up checks, the supervisor, and the start of a child.

`supervisor.py` is the table of contents: it starts the processes, introduces them to each other, watches, restarts and
stops them. None of it touches a request.
"""
