"""Parent-death signal: the kernel kills a process when its supervisor dies. Imports nothing heavy."""

import ctypes
import os
import signal
import sys

SUPERVISOR_VARIABLE = "MOONPOOL_SUPERVISOR_PID"

_PR_SET_PDEATHSIG = 1


def die_with_supervisor() -> None:
    """Request SIGKILL from the kernel at the supervisor's death, if MOONPOOL_SUPERVISOR_PID names a supervisor.

    It is SIGKILL, because an orphan that hangs in its clean stop is worse than one that skips it: the kernel releases
    its sockets and shared memory anyway. Linux only; on other systems the user stops orphans.
    """
    supervisor = os.environ.get(SUPERVISOR_VARIABLE)
    if supervisor is None or not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(supervisor):
        # The supervisor died before the prctl above, so no signal will come.
        sys.exit("the supervisor has ended; exiting")
