"""Memory views of a region's slices, for scatter and gather calls."""

from messenger.memory import Region
from messenger.slices import Rows


def views(region: Region, rows: Rows) -> list[memoryview]:
    """One view per row of int64 [n, 2] (offset, nbytes); none for an empty one, which reads as an end."""
    view = region.view
    return [view[offset : offset + nbytes] for offset, nbytes in rows.tolist() if nbytes]
