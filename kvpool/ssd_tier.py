"""The SSD tier of one pool node, put together: the store, what is known of its health, loads and write-back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.config import PoolNodeConfig
from kvpool.errors import SsdFolderError
from kvpool.loading import Loader
from kvpool.policy import PoolCore, SsdBlock
from kvpool.ssd import SsdConfig, SsdEntry, SsdStore
from kvpool.ssd.folder import check_folder
from kvpool.ssd_health import SsdHealth, SsdState
from kvpool.writeback import WriteBack

__all__ = ["SsdTier"]

_LAST_WRITES_S = 2.0
_CLOSE_S = 10.0

_log = logging.getLogger(__name__)


class SsdTier:
    """From `open` to `close`; all methods belong to one event loop."""

    def __init__(
        self,
        store: SsdStore,
        folder: Path,
        core: PoolCore,
        arena: NDArray[np.uint8],
        tell: Callable[[], None],
        counters: defaultdict[str, float],
    ) -> None:
        self.store = store
        self._folder = folder
        self.health = SsdHealth(str(folder))
        self.loader = Loader(core, store, arena, self.health, tell, counters)
        self.write_back = WriteBack(core, store, arena, self.health, self.loader, tell, counters)
        self._writing = asyncio.get_running_loop().create_task(self.write_back.run())

    @classmethod
    async def open(
        cls,
        config: PoolNodeConfig,
        core: PoolCore,
        arena: NDArray[np.uint8],
        tell: Callable[[], None],
        counters: defaultdict[str, float],
    ) -> SsdTier:
        """Open the node's folder and let `core` take in what is there. Raises SsdFolderError, which says what to do."""
        folder = config.ssd_folder
        assert folder is not None
        store = await asyncio.to_thread(_open, folder, config)
        try:
            began = time.perf_counter()
            recovered = store.recovered
            taken = core.restore(time.monotonic_ns(), [_ssd_block(entry) for entry in recovered])
            await asyncio.to_thread(store.free, core.take_ssd_freed())
            found = store.stats().recovery
            _log.info(
                "the SSD tier in %s has %d blocks, %d more found there were not taken in; %s; %.1f s",
                folder,
                taken,
                len(recovered) - taken,
                ", ".join(f"{name} {count}" for name, count in sorted(found.items())) or "a new journal",
                time.perf_counter() - began,
            )
            if found.get("lost_frames") or found.get("torn_end"):
                _log.warning("the journal in %s was damaged: what it still says is kept, the rest was dropped", folder)
        except BaseException:
            await asyncio.to_thread(store.close)
            raise
        return cls(store, folder, core, arena, tell, counters)

    @property
    def state(self) -> SsdState:
        """Whether the SSD is read and written, only read, or left alone."""
        return self.health.state

    def told(self) -> dict[str, Any]:
        """What there is to know of the disk, as plain data."""
        stats = self.store.stats()
        return {
            "folder": str(self._folder),
            "state": self.state.value,
            "direct": stats.direct,
            "recovery": stats.recovery,
            "journal_bytes": stats.journal_nbytes,
            "read_p50_s": stats.reads.p50_s,
            "read_p99_s": stats.reads.p99_s,
            "write_p50_s": stats.writes.p50_s,
            "write_p99_s": stats.writes.p99_s,
        }

    async def close(self) -> None:
        """End loads, write what is in memory alone as far as it takes 2 s, and leave the disk.

        All that was written is found again at the next start.
        """
        self._writing.cancel()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.gather(self._writing, return_exceptions=True)
                await self.loader.close()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LAST_WRITES_S):
                        await self.write_back.write_everything()
                await self.write_back.close()
                closed = await asyncio.to_thread(self.store.close, _CLOSE_S)
        except TimeoutError:
            closed = False
        if not closed:
            _log.error("the SSD in %s did not answer within %g s: it is left as it is", self._folder, _CLOSE_S)


def _open(folder: Path, config: PoolNodeConfig) -> SsdStore:
    try:
        if not folder.exists():
            check_folder(folder.parent)  # before a folder is left where none can be used
            folder.mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise SsdFolderError(
            f"the node's folder {folder} cannot be made: {error.strerror}; give a folder that this user can write to"
        ) from error
    return SsdStore.open(
        SsdConfig(
            dir=folder,
            nbytes=config.limits.ssd_nbytes,
            node_id=config.node_id,
            read_depth=config.ssd_depth,
            write_depth=config.ssd_depth,
        )
    )


def _ssd_block(entry: SsdEntry) -> SsdBlock:
    return SsdBlock(
        offset=entry.offset,
        kv_namespace=entry.kv_namespace,
        chain_key=entry.chain_key,
        parent=entry.parent,
        spec=entry.spec,
        digests=entry.digests,
        num_tokens=entry.num_tokens,
        compute_s=entry.compute_s,
    )
