"""Snapshots of the directory: written in the background, loaded at the start. Losing one costs a resync."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from conductor.directory import Directory
from conductor.directory.directory import DumpedNode
from conductor.directory.table import Replicas
from conductor.errors import SnapshotUnusable
from conductor.shared_store.records import SnapshotPointer
from conductor.shared_store.snapshot_file import SnapshotFacts, SnapshotReader, SnapshotWriter, remove_unfinished

__all__ = ["FILE_NAME", "Snapshots"]

log = logging.getLogger(__name__)
FILE_NAME = "directory.snapshot"


class Snapshots:
    """Of one conductor's directory, in the file `directory.snapshot` of a folder."""

    def __init__(self, folder: Path, cluster_name: str, directory: Directory) -> None:
        """Raises OSError when the folder cannot be made, or not written to."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder.resolve() / FILE_NAME
        remove_unfinished(self.path)
        self._cluster_name = cluster_name
        self._directory = directory
        self._last: Sequence[DumpedNode] = ()  # what the last snapshot told of

    async def restore(self, elsewhere: Sequence[SnapshotPointer]) -> dict[str, str]:
        """Load the newest snapshot that can be read here: the file, or one that another conductor wrote.

        Returns the targets of the nodes in it. The directory must not follow any node yet.
        """
        ways = [Path(pointer.path) for pointer in sorted(elsewhere, key=lambda pointer: -pointer.written_at)]
        with contextlib.ExitStack() as opened:
            readers = []
            for path in dict.fromkeys([self.path, *ways]):
                try:
                    readers.append(opened.enter_context(await asyncio.to_thread(self._open, path)))
                except FileNotFoundError:
                    continue
                except (SnapshotUnusable, OSError) as error:
                    log.warning("a snapshot of the directory is left alone: %s", error)
            if not readers:
                return {}
            newest = max(readers, key=lambda reader: reader.facts.written_at)
            return await self._load(newest)

    async def write(self, targets: Callable[[], dict[str, str]]) -> SnapshotPointer | None:
        """Write what the directory knows, while events come in; None: nothing has changed since the last time."""
        dumped = self._directory.begin_dump()
        if not dumped or dumped == self._last:
            return None
        began_s = time.monotonic()
        with await asyncio.to_thread(SnapshotWriter, self.path) as writer:
            for replicas in self._directory.dump(frozenset(node.number for node in dumped)):
                await asyncio.to_thread(writer.add, replicas)
            complete = self._directory.end_dump(dumped)
            facts = SnapshotFacts(self._cluster_name, time.time(), tuple(complete), targets())
            nbytes = await asyncio.to_thread(writer.finish, facts)
        self._last = dumped
        seconds = time.monotonic() - began_s
        log.info("wrote a snapshot of the directory: %d nodes, %d bytes in %.1f s", len(complete), nbytes, seconds)
        positions = {node.node: (node.position.incarnation, node.position.seq) for node in complete}
        return SnapshotPointer(str(self.path), socket.gethostname(), facts.written_at, positions)

    def _open(self, path: Path) -> SnapshotReader:
        reader = SnapshotReader(path)
        if reader.facts.cluster != self._cluster_name:
            with reader:
                raise SnapshotUnusable(f"{path} is of the cluster {reader.facts.cluster!r}, not {self._cluster_name!r}")
        return reader

    async def _load(self, reader: SnapshotReader) -> dict[str, str]:
        facts = reader.facts
        nodes = [node for node in facts.nodes if node.node in facts.targets]
        numbers = np.zeros(1 + max((node.number for node in facts.nodes), default=0), np.int64)
        num_blocks, is_complete = 0, False
        try:
            for node in nodes:
                numbers[node.number] = self._directory.restore_node(node)
            parts = reader.parts()
            while (replicas := await asyncio.to_thread(next, parts, None)) is not None:
                self._directory.restore(_renumbered(replicas, numbers))
                num_blocks += len(replicas.keys)
            is_complete = True
        except OSError as error:
            log.warning("the snapshot of the directory could not be read to its end: %s", error)
        finally:
            if not is_complete:
                for node in nodes:
                    self._directory.drop_node(node.node)
        if not is_complete:
            return {}
        age_s = time.time() - facts.written_at
        text = "loaded the directory as of %.0f s ago: %d blocks on %d nodes; their events since follow"
        log.info(text, age_s, num_blocks, len(nodes))
        return {node.node: facts.targets[node.node] for node in nodes}


def _renumbered(replicas: Replicas, numbers: np.typing.NDArray[np.int64]) -> Replicas:
    """Under this directory's numbers, without nodes that the snapshot does not tell of."""
    old = (replicas.codes >> 1).astype(np.int64)
    new = np.where(old < len(numbers), numbers[np.minimum(old, len(numbers) - 1)], 0)
    kept = new > 0
    codes = (new[kept] * 2 + (replicas.codes[kept] & 1)).astype(np.uint32)
    return Replicas(np.ascontiguousarray(replicas.keys[kept], np.uint64), codes)
