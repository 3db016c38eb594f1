"""Memory of a GPU as the messenger knows it: only adapters touch it, by rdma, and no code of this process does."""

from dataclasses import dataclass

from messenger.memory import Region
from rpc.errors import InvalidArgument

__all__ = ["AnyRegion", "GpuMemory", "GpuRegion", "NotInHostMemory", "in_host", "out_of_reach"]


class NotInHostMemory(Exception):
    """A transport that moves host memory was given a GPU's; travels to the caller as MemoryOutOfReach."""


@dataclass(frozen=True)
class GpuMemory:
    """Memory of a GPU by its device pointer, as of a torch tensor's data_ptr(), within one allocation.

    It must stay allocated until its region is deregistered and what was under way with it has ended. Raises
    InvalidArgument for what can be no such memory.
    """

    address: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.address <= 0 or self.nbytes <= 0:
            raise InvalidArgument(
                f"{self.nbytes} bytes at {self.address:#x} are no GPU memory: expected a device pointer and a size"
            )


@dataclass(frozen=True, eq=False)
class GpuRegion:
    """GPU memory registered with a messenger; `region_id` is never reused by it."""

    region_id: int
    memory: GpuMemory

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes


AnyRegion = Region | GpuRegion


def in_host(region: AnyRegion) -> Region:
    """The region, if this process may touch its bytes itself. Raises NotInHostMemory."""
    if isinstance(region, Region):
        return region
    raise NotInHostMemory(out_of_reach(region))


def out_of_reach(region: GpuRegion) -> str:
    """Why a transport that moves host memory leaves the region alone, and what to do."""
    return (
        f"region {region.region_id} is GPU memory, which rdma alone reaches: see to it that both sides speak rdma, or "
        "keep a copy in host memory"
    )
