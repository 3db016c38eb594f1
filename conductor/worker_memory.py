"""Directory of the blocks that workers hold in their own memory. Lost with the worker; never persisted."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from conductor.directory.directory import Matches, WindowedBlocks
from conductor.directory.feeds import WORKERS, DirectoryUpdater
from moonpool_proto.v1 import conductor_pb2

__all__ = ["WorkerMemory"]


class WorkerMemory:
    """Blocks of the joined workers that take new work; versions that do not report blocks are left out."""

    def __init__(self) -> None:
        self.updater = DirectoryUpdater(WORKERS)

    def start(self) -> None:
        """Begin to follow the workers that have joined and will join."""
        self.updater.open()

    def note(self, node: conductor_pb2.Node, *, is_draining: bool) -> None:
        """Follow a worker that has reported, possibly at a new address, if it reports its blocks and takes new work."""
        if node.reports_blocks and not is_draining:
            self.updater.join(node.node_id, node.target)
        else:
            self.updater.leave(node.node_id)

    def remove(self, node_id: str) -> None:
        """Forget a worker that left, with its blocks."""
        self.updater.leave(node_id)

    def match(
        self, kv_namespace: bytes, keys: NDArray[np.uint64], windows: WindowedBlocks | None = None
    ) -> Matches | None:
        """Return the number of leading blocks of the chain (uint64 [n]) that each worker holds; None if none does.

        With `windows`, as `Directory.match`.
        """
        directory = self.updater.directory
        if not directory.num_followed or not len(keys):
            return None
        found = directory.match(kv_namespace, keys, windows)
        return found if found.longest else None

    def state(self) -> dict[str, Any]:
        """Return the directory's state per worker as JSON."""
        return self.updater.state()

    def validate(self) -> list[str]:
        """Return inconsistencies of the directory."""
        return self.updater.directory.validate()

    async def close(self) -> None:
        """End all feeds."""
        await self.updater.close()
