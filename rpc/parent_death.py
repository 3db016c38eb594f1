"""Processes that end with others: by the kernel's signal at a parent's death, or by watching any process. Imports
nothing heavy.
"""

import ctypes
import os
import select
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> bool:
    """Request SIGKILL from the kernel at the death of the parent, more exactly of its thread that started this process.

    Returns False if the process `parent_pid` is no longer the parent: it died before the request, so no signal will
    come. Linux only; on other systems it does nothing and returns True.
    """
    if not sys.platform.startswith("linux"):
        return True
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == parent_pid


def die_with(pid: int) -> None:
    """Kill this process as soon as the process `pid` has ended, which need not be its parent. Linux only.

    Raises ProcessLookupError if it has ended already.
    """
    watched = os.pidfd_open(pid)

    def wait() -> None:
        select.select([watched], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name=f"die-with-{pid}", daemon=True).start()
