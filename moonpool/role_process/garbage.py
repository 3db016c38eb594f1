"""Control of Python's garbage collector in a role's process, so that full collections happen only when it is idle.

A full collection over the objects of a thousand requests stops every thread for a tenth of a second and finds nothing,
because requests are freed by reference counting alone.
"""

import gc
from typing import Final

_MOST_PASSES: Final = 200  # of the middle generation: about a million more objects than before


def collect_and_freeze() -> None:
    """Collect now, and exempt all objects that remain from later collections."""
    gc.collect()
    gc.freeze()


def defer_full_collections() -> None:
    """Defer full collections to `collect_when_idle`, unless very many objects accumulate."""
    gc.set_threshold(*gc.get_threshold()[:2], _MOST_PASSES)


def collect_when_idle() -> None:
    """Collect if there are new objects; to be called when no request is running. Takes a few milliseconds."""
    if gc.get_count()[2]:
        collect_and_freeze()
