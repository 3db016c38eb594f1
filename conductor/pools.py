"""The conductor's clients of the pool nodes: prefix matching, copies of hot prefixes, replica hints.

`CopiedPrefixes` is bookkeeping without I/O; `PoolNodes` does the calls.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conductor.core import Core
from conductor.directory import Directory, DirectoryState, WindowedBlocks
from conductor.directory.directory import Match, Matches
from conductor.directory.feeds import POOL_NODES, DirectoryUpdater, sample
from conductor.policy.decisions import Copy, Shrink
from conductor.policy.events import CopyFinished
from kvpool import KvPoolError, keys_from_bytes, keys_u64
from kvpool.client import PoolClient
from moonpool_proto.v1 import conductor_pb2
from rpc.errors import NetworkError

_MAX_PREFIXES = 4096


@dataclass(eq=False)
class CopiedPrefix:
    """A prefix and its copies."""

    kv_namespace: bytes
    chain: NDArray[np.uint8]  # [num_blocks, 16]
    num_stored: int  # of these blocks, the last ones, which pools store
    targets: dict[str, int] = field(default_factory=dict)  # match_key of the Copy, per pool node
    hinted: frozenset[str] = frozenset()  # holders that received the current replica count
    leaving: frozenset[str] = frozenset()  # pool nodes that are dropping it; the directory may still list them

    @property
    def name(self) -> tuple[bytes, int]:
        """Identity: namespace and short key of the last block."""
        return self.kv_namespace, int(keys_u64(self.chain[-1:])[0])

    @property
    def stored(self) -> NDArray[np.uint8]:
        """Keys of the blocks that pools store of it, [num_stored, 16]."""
        return self.chain[len(self.chain) - self.num_stored :]


class CopiedPrefixes:
    """Bounded table of copied prefixes; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._prefixes: dict[tuple[bytes, int], CopiedPrefix] = {}
        self._lengths: defaultdict[bytes, Counter[int]] = defaultdict(Counter)  # blocks of the prefixes, per namespace
        self._waiting: list[tuple[bytes, int]] = []  # not yet visited in this round

    def __len__(self) -> int:
        return len(self._prefixes)

    def add(
        self, kv_namespace: bytes, chain: bytes, target: str, match_key: int, *, most_stored: int | None = None
    ) -> CopiedPrefix:
        """Record that the prefix was copied to `target`. Pools store its last `most_stored` blocks, by default all."""
        keys = keys_from_bytes(chain).copy()
        fresh = CopiedPrefix(kv_namespace, keys, len(keys) if most_stored is None else min(len(keys), most_stored))
        prefix = self._prefixes.get(fresh.name)
        if prefix is None:
            if len(self._prefixes) >= _MAX_PREFIXES:
                self.forget(next(iter(self._prefixes.values())))
            prefix = self._prefixes[fresh.name] = fresh
            self._lengths[kv_namespace][len(fresh.chain)] += 1
        prefix.targets[target] = match_key
        return prefix

    def next_batch(self, num_blocks: int) -> list[CopiedPrefix]:
        """Return the next prefixes in round-robin order, until they have `num_blocks` blocks in total."""
        taken, left = [], num_blocks
        if not self._waiting:
            self._waiting = list(self._prefixes)
        while self._waiting and left > 0:
            prefix = self._prefixes.get(self._waiting.pop())
            if prefix is not None:
                taken.append(prefix)
                left -= len(prefix.chain)
        return taken

    def reset_hints(self, pool: str) -> None:
        """Forget replica hints sent to `pool`, which lost them because it joined again."""
        for prefix in self._prefixes.values():
            prefix.hinted -= {pool}

    def within(self, kv_namespace: bytes, keys: NDArray[np.uint64]) -> dict[str, int]:
        """Return the match_key by pool node that received some of the prompt's blocks (keys uint64 [n]) by a Copy."""
        found: dict[str, int] = {}
        for length in sorted(self._lengths.get(kv_namespace, ())):
            if length <= len(keys):
                prefix = self._prefixes.get((kv_namespace, int(keys[length - 1])))
                found.update(prefix.targets if prefix is not None else {})
        return found

    def shrink(self, target: str, match_key: int) -> CopiedPrefix | None:
        """Remove the copy at `target` and return its prefix; None if it is unknown."""
        for prefix in self._prefixes.values():
            if prefix.targets.get(target) == match_key:
                del prefix.targets[target]
                return prefix
        return None

    def forget(self, prefix: CopiedPrefix) -> None:
        """Stop tracking the prefix."""
        del self._prefixes[prefix.name]
        lengths = self._lengths[prefix.kv_namespace]
        lengths[len(prefix.chain)] -= 1
        if not lengths[len(prefix.chain)]:
            del lengths[len(prefix.chain)]
        if not lengths:
            del self._lengths[prefix.kv_namespace]


log = logging.getLogger(__name__)
_OWNER = "conductor"
_MOST_HOLDERS = 3
_BLOCKS_AT_ONCE = 1 << 16  # blocks of copied prefixes that one call looks up, which takes some milliseconds


class PoolNodes:
    """Clients of the joined pool nodes, and the directory of their blocks."""

    def __init__(self, core: Core, incarnation: int, copy_timeout_s: float) -> None:
        self._core = core
        self._incarnation = incarnation
        self._copy_timeout_s = copy_timeout_s
        self.directory_updater = DirectoryUpdater(POOL_NODES)
        self.replicas = CopiedPrefixes()
        self._clients: dict[str, PoolClient] = {}
        self._roster: tuple[str, ...] | None = None  # as of the last match
        self._absent = np.zeros(0, int)  # indices in the roster of nodes that have not joined here
        self._tasks: set[asyncio.Task[None]] = set()  # copies, hints, removals, and clients being closed

    def add(self, node: conductor_pb2.Node) -> None:
        """Add a pool node that joined, possibly at a new address."""
        self._disconnect(node.node_id)
        self._clients[node.node_id] = PoolClient(node.target, owner=_OWNER, owner_incarnation=self._incarnation)
        self.directory_updater.join(node.node_id, node.target)
        self.replicas.reset_hints(node.node_id)

    def remove(self, node_id: str) -> None:
        """Remove a pool node that left."""
        self._disconnect(node_id)
        self.directory_updater.leave(node_id)

    @property
    def directory(self) -> Directory:
        """Directory of all followed pool nodes."""
        return self.directory_updater.directory

    def match(self, kv_namespace: bytes, keys: NDArray[np.uint64], windows: WindowedBlocks | None = None) -> Matches:
        """Return the number of leading blocks of the chain (uint64 [n]) that each joined pool node holds.

        With `windows`, as `Directory.match`.
        """
        matches = self.directory.match(kv_namespace, keys, windows)
        if matches.roster is not self._roster:
            self._roster = matches.roster
            self._absent = np.array([i for i, node_id in enumerate(self._roster) if node_id not in self._clients], int)
        if len(self._absent):
            held = matches.held
            held[:, self._absent] = 0
            return Matches(matches.roster, held, int(held[0].max(initial=0)))
        return matches

    def holders(self, kv_namespace: bytes, keys: NDArray[np.uint64]) -> list[tuple[str, Match]]:
        """Return at most three pool nodes with leading blocks of the chain: most blocks first, then fewest on SSD."""
        found = self.match(kv_namespace, keys).items()
        return sorted(found, key=lambda held: (-held[1].blocks, held[1].ssd_blocks, held[0]))[:_MOST_HOLDERS]

    def start_copy(self, copy: Copy, kv_namespace: bytes, chain: bytes, windows: WindowedBlocks | None = None) -> None:
        """Start a copy in the background; its end is reported to the policy as CopyFinished.

        With `windows`, the windowed blocks at its end are copied, too. Blocks that a prefill node fetches and keeps are
        only recorded.
        """
        keys = keys_from_bytes(chain)[: copy.num_blocks]
        if copy.keeps_fetched:
            self._copied(copy, kv_namespace, keys, windows)
            return
        source, target = self._clients[copy.source], self._clients[copy.target]
        self._spawn(self._copy(copy, source.target, target, kv_namespace, keys, windows))

    def shrink(self, shrink: Shrink) -> None:
        """Drop an unused copy in the background, unless it may be the last one."""
        prefix = self.replicas.shrink(shrink.pool, shrink.match_key)
        if prefix is None or shrink.pool not in self._clients:
            return
        others = self._holders(prefix) - prefix.leaving - {shrink.pool}
        if any(self.directory.state(pool) is DirectoryState.EXACT for pool in others):
            prefix.leaving |= {shrink.pool}
            brought = prefix.chain[max(shrink.keep_blocks, len(prefix.chain) - prefix.num_stored) :]
            self._spawn(self._drop(self._clients[shrink.pool], shrink.pool, prefix.kv_namespace, brought))

    def send_replica_hints(self) -> None:
        """Send each holder of a copied prefix the number of other holders, if the holders have changed.

        Each call covers a bounded number of blocks; later calls cover the other prefixes.
        """
        account = self._core.policy.replication
        for prefix in self.replicas.next_batch(_BLOCKS_AT_ONCE):
            prefix.targets = {pool: key for pool, key in prefix.targets.items() if account.of(pool, key) is not None}
            holders = self._holders(prefix)
            prefix.leaving &= holders
            if holders != prefix.hinted:
                prefix.hinted = holders
                for pool in sorted(holders):
                    self._spawn(self._hint(self._clients[pool], prefix, pool, len(holders) - 1))
            if len(holders) < 2 and not prefix.targets:
                self.replicas.forget(prefix)

    @property
    def num_copies(self) -> int:
        """Number of background tasks: copies, removals and hints."""
        return len(self._tasks)

    def state(self) -> dict[str, Any]:
        """Return the directory's state per pool node as JSON."""
        return self.directory_updater.state()

    def samples(self) -> Iterator[conductor_pb2.Sample]:
        """Yield as metrics the number of replicas, and the seconds that copying hot prefixes cost and saved."""
        account = self._core.policy.replication
        yield sample("replicas", len(account))
        yield sample("replication_saved_seconds_total", account.saved_s)
        yield sample("replication_spent_seconds_total", account.spent_s)

    def validate(self) -> list[str]:
        """Return inconsistencies of the directory."""
        return self.directory.validate()

    async def close(self) -> None:
        """Cancel event feeds, wait for background tasks and disconnect."""
        for node_id in list(self._clients):
            self._disconnect(node_id)
        await self.directory_updater.close()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _disconnect(self, node_id: str) -> None:
        client = self._clients.pop(node_id, None)
        self._roster = None
        if client is not None:
            self._spawn(client.close())

    async def _copy(
        self,
        copy: Copy,
        source_target: str,
        target: PoolClient,
        kv_namespace: bytes,
        keys: NDArray[np.uint8],
        windows: WindowedBlocks | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        began_s, nbytes = loop.time(), 0
        try:
            num_blocks = 0
            if windows is None or not windows.are_all(kv_namespace):
                num_blocks, nbytes = await target.copy(kv_namespace, keys, source_target, self._copy_timeout_s)
            if windows is not None:
                seen = keys[-windows.num_seen :]
                num_seen, seen_nbytes = await target.copy(
                    windows.kv_namespace, seen, source_target, self._copy_timeout_s, alone=True
                )
                num_blocks, nbytes = num_blocks or num_seen, nbytes + seen_nbytes
            log.info("copied %d hot blocks from %s to %s", num_blocks, copy.source, copy.target)
        except (KvPoolError, NetworkError) as error:
            log.warning("hot blocks were not copied from %s to %s: %s", copy.source, copy.target, error)
        else:
            if num_blocks:
                self._copied(copy, kv_namespace, keys, windows)
        finally:
            # Also if the client was closed; otherwise the policy would wait for the copy indefinitely.
            seconds = loop.time() - began_s
            self._core.handle(CopyFinished(copy.source, copy.target, copy.match_key, nbytes, seconds))

    def _copied(self, copy: Copy, kv_namespace: bytes, keys: NDArray[np.uint8], windows: WindowedBlocks | None) -> None:
        most = windows.num_seen if windows is not None and windows.are_all(kv_namespace) else None
        self.replicas.add(kv_namespace, keys.tobytes(), copy.target, copy.match_key, most_stored=most)

    async def _drop(self, client: PoolClient, pool: str, kv_namespace: bytes, brought: NDArray[np.uint8]) -> None:
        try:
            removed = await client.evict(kv_namespace, brought)
            log.info("dropped %d of %d unused copied blocks at %s", removed, len(brought), pool)
        except (KvPoolError, NetworkError) as error:
            log.warning("copied blocks were not dropped at %s (its eviction may still remove them): %s", pool, error)

    async def _hint(self, client: PoolClient, prefix: CopiedPrefix, pool: str, others: int) -> None:
        try:
            await client.hint(prefix.kv_namespace, prefix.stored, [others] * prefix.num_stored)
        except (KvPoolError, NetworkError) as error:
            prefix.hinted -= {pool}
            log.info("%s did not receive the hint about %d other holders: %s", pool, others, error)

    def _holders(self, prefix: CopiedPrefix) -> frozenset[str]:
        """Return the joined pool nodes that hold all that they store of the prefix."""
        held = self.match(prefix.kv_namespace, keys_u64(prefix.stored))
        return frozenset(pool for pool, match in held.items() if match.blocks == prefix.num_stored)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
