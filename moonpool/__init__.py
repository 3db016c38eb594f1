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

# gRPC reads both variables once, at import.
# By default its core prints every failed handshake to stderr, past our logs; callers report such errors themselves.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Its event engine passes every message through one more thread pool. Without it, the completion queue's thread polls
# the sockets itself: a message costs 0.6 of the CPU time and arrives in 0.7 of the time.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
