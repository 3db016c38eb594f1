"""Memory that is registered with an adapter. Pure, but for the objects it holds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _is_settled() -> None:
    """Do nothing: host memory holds an adapter's writes when they complete."""


@dataclass(frozen=True)
class Registered:
    """A registration. `mr` is pyverbs' object; the registration ends with its last reference.

    `first_address` is the address that verbs use for the memory's first byte: its address in this process, a GPU's
    device pointer with peer memory, or an offset in the exported pages with dmabuf.
    """

    mr: Any
    first_address: int
    settle: Callable[[], None] = _is_settled
    """Make an adapter's completed writes visible to all readers. Raises GpuMemoryUnsupported."""

    @property
    def lkey(self) -> int:
        return int(self.mr.lkey)

    def close(self) -> None:
        self.mr.close()
