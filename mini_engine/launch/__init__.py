"""The supervisor: starts the processes, introduces them to each other, watches, restarts and stops them.

`supervisor.py` is the table of contents. None of it touches a request.
"""

from mini_engine.launch.supervisor import Supervisor

__all__ = ["Supervisor"]
