"""Application layer: command line, configuration, and the processes of a cluster. No other package imports it."""

import os
import signal
import threading
from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


# The kernel delivers no signal without a handler to a container's first process: a SIGTERM during its imports would be
# lost, and the container killed after its grace. A role's own handler replaces this one.
_is_first = os.getpid() == 1 and threading.current_thread() is threading.main_thread()
if _is_first and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
    signal.signal(signal.SIGTERM, _end)

# By default gRPC's core prints every failed handshake to stderr, past our logs; callers report such errors themselves.
# gRPC reads this variable once, at import.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
