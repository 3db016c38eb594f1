"""Memory views of a region's slices, for scatter and gather calls."""

from collections.abc import Iterable, Sequence

from messenger.gpu import AnyRegion, in_host


def views(region: AnyRegion, runs: Iterable[Sequence[int]]) -> list[memoryview]:
    """One view for each (offset, nbytes); none for an empty one, which reads as an end. Raises NotInHostMemory."""
    view = in_host(region).view
    return [view[offset : offset + nbytes] for offset, nbytes in runs if nbytes]
