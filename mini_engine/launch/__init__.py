"""The supervisor: lays out the processes, shakes hands with them, watches them, starts them anew, and stops them.

`supervisor.py` is the table of contents. None of it touches a request.
"""

from mini_engine.launch.supervisor import Supervisor

__all__ = ["Supervisor"]
