"""Threads whose work nobody's next token waits for: on a busy machine they leave the cores to the engines."""

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

_NICENESS = 10


def background_threads(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Return an executor whose threads have a low priority; `name` begins their names.

    Has an effect on Linux only, where priorities are per thread.
    """
    return ThreadPoolExecutor(num_threads, name, initializer=lower_priority)


def lower_priority() -> None:
    """Lower the priority of the calling thread."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
