"""Ties a process's life to its supervisor's: the kernel kills it when the supervisor dies. Imports nothing heavy."""

import ctypes
import os
import signal
import sys

SUPERVISOR_VARIABLE = "MOONPOOL_SUPERVISOR_PID"

_PR_SET_PDEATHSIG = 1


def tether_to_supervisor() -> None:
    """Ask the kernel for SIGKILL at the supervisor's death, if MOONPOOL_SUPERVISOR_PID names one.

    SIGKILL, because an orphan that hangs in its clean stop is worse than one that had none: all it holds (sockets,
    shared memory) goes with the process. Linux only; elsewhere an orphan is stopped by its user.
    """
    supervisor = os.environ.get(SUPERVISOR_VARIABLE)
    if supervisor is None or not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(supervisor):
        # It died between our birth and the prctl above, so no signal will come.
        sys.exit("the supervisor is gone; ending")
