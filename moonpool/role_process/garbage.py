"""Control of Python's garbage collector in a role's process, so that full collections happen only when it is idle.

A full collection over the objects of a thousand requests stops every thread for a tenth of a second and finds nothing,
because requests are freed by reference counting alone.
"""

import gc
from typing import Final

_MOST_PASSES: Final = 200  # of the middle generation: about a million more objects than before


def settle() -> None:
    """Collect now, and exempt all objects that remain from later collections."""
    gc.collect()
    gc.freeze()


def wait_for_rest() -> None:
    """Defer full collections to `settle_at_rest`, unless very many objects accumulate."""
    gc.set_threshold(*gc.get_threshold()[:2], _MOST_PASSES)


def settle_at_rest() -> None:
    """Collect if there are new objects; to be called when no request is running. Takes a few milliseconds."""
    if gc.get_count()[2]:
        settle()
