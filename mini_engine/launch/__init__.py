"""The supervisor: starts the processes, introduces them to each other, watches, restarts and stops them.

`supervisor.py` is the table of contents. None of it touches a request.
"""
