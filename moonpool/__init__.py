"""The application: command line, configuration, and the processes of a cluster. Nothing below imports it."""

import os
import signal
import threading
from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


# The kernel gives a container's first process no signal that it has no handler for: told to end while it still imports,
# it would come up all the same, and be killed when its grace is over. A role's own handler takes the place of this one.
_is_first = os.getpid() == 1 and threading.current_thread() is threading.main_thread()
if _is_first and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
    signal.signal(signal.SIGTERM, _end)

# Left to itself, gRPC's core prints every handshake that fails, past our logs. What is wrong is told by those who
# called. It looks at this once, when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
