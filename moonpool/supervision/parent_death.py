"""Parent-death signal of a role: the kernel kills it when its supervisor dies. Imports nothing heavy."""

import os
import sys

from rpc.parent_death import die_with_parent

SUPERVISOR_VARIABLE = "MOONPOOL_SUPERVISOR_PID"


def die_with_supervisor() -> None:
    """Request SIGKILL from the kernel at the supervisor's death, if MOONPOOL_SUPERVISOR_PID names a supervisor.

    It is SIGKILL, because an orphan that hangs in its clean stop is worse than one that skips it: the kernel releases
    its sockets and shared memory anyway. Linux only; on other systems the user stops orphans.
    """
    supervisor = os.environ.get(SUPERVISOR_VARIABLE)
    if supervisor is not None and not die_with_parent(int(supervisor)):
        sys.exit("the supervisor has ended; exiting")
