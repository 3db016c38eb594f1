"""A piece of memory that an adapter knows; pure but for what it holds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _is_settled() -> None:
    """Host memory: what an adapter wrote is there when it says so."""


@dataclass(frozen=True)
class Registered:
    """`mr` is pyverbs' registration, which ends with its last reference.

    `first_address` is what verbs call the memory's first byte: its address in this process, a GPU's device pointer by
    peer memory, an offset in the exported pages by dmabuf.
    """

    mr: Any
    first_address: int
    settle: Callable[[], None] = _is_settled
    """What an adapter said that it wrote is seen by whoever looks once this returns. Raises GpuMemoryUnsupported."""

    @property
    def lkey(self) -> int:
        return int(self.mr.lkey)

    def close(self) -> None:
        self.mr.close()
