"""The application: command line, configuration, and the processes of a cluster. Nothing below imports it."""

import os
import signal
from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


# The kernel gives a container's first process no signal that it has no handler for: told to end while it still imports,
# it would come up all the same, and be killed when its grace is over. A role's own handlers take the place of these.
if os.getpid() == 1:
    for _number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(_number, _end)

# Left to itself, gRPC's core prints every handshake that fails, past our logs. What is wrong is told by those who
# called. It looks at this once, when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
