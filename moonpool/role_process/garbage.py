"""When a role's process looks for garbage that only Python's collector finds. Not while it serves: a full look at the
objects of a thousand requests stops every thread for a tenth of a second, and finds nothing, for requests are made so
that they are freed without it.
"""

import gc
from typing import Final

_MOST_PASSES: Final = 200  # of the middle generation: some million objects more than before


def settle() -> None:
    """Collect now, and leave what is there by now alone from then on."""
    gc.collect()
    gc.freeze()


def wait_for_rest() -> None:
    """Let the collector wait for `settle_at_rest`, unless very much has come together."""
    gc.set_threshold(*gc.get_threshold()[:2], _MOST_PASSES)


def settle_at_rest() -> None:
    """Called when nothing is under way: settle if there is anything new to look at. It takes some milliseconds."""
    if gc.get_count()[2]:
        settle()
