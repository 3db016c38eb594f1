"""Registrations of memory with an adapter."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _is_settled() -> None:
    """Do nothing: an adapter's writes to host memory are visible when they complete."""


@dataclass(frozen=True)
class Registered:
    """A registration. `mr` is the pyverbs object; the registration ends with its last reference.

    `first_address` is the address that verbs use for the memory's first byte: its address in this process, a GPU's
    device pointer (peer memory), or an offset in the exported pages (dmabuf).
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
