"""Memory views of a region's slices, for scatter and gather calls."""

from collections.abc import Iterable, Sequence

from messenger.memory import Region


def views(region: Region, runs: Iterable[Sequence[int]]) -> list[memoryview]:
    """One view for each (offset, nbytes); none for an empty one, which reads as an end."""
    view = region.view
    return [view[offset : offset + nbytes] for offset, nbytes in runs if nbytes]
