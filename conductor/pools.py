"""Prefixes that were copied between pool nodes: found again in prompts, and kept count of. No I/O.

The pool nodes as the conductor uses them: followed while they are there, prefixes matched, copies carried out.
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
from conductor.directory import Directory, DirectoryState
from conductor.directory.directory import Matches
from conductor.directory.feeds import DirectoryUpdater, sample
from conductor.policy.decisions import Copy, Shrink
from conductor.policy.events import CopyFinished
from kvpool import KvPoolError, keys_from_bytes, keys_u64
from kvpool.client import PoolClient
from moonpool_proto.v1 import conductor_pb2
from rpc.errors import NetworkError

_MAX_PREFIXES = 4096


@dataclass(eq=False)
class CopiedPrefix:
    """A prefix, and the copies of it that were made."""

    kv_namespace: bytes
    chain: NDArray[np.uint8]  # [num_blocks, 16]
    targets: dict[str, int] = field(default_factory=dict)  # match_key of the Copy, per pool node
    told: frozenset[str] = frozenset()  # the holders that know how many there are
    leaving: frozenset[str] = frozenset()  # pool nodes that were asked to drop it, and may still seem to have it

    @property
    def name(self) -> tuple[bytes, int]:
        """Namespace and short key of the last block."""
        return self.kv_namespace, int(keys_u64(self.chain[-1:])[0])


class CopiedPrefixes:
    """A bounded number of copied prefixes; the ones copied longest ago are forgotten first."""

    def __init__(self) -> None:
        self._prefixes: dict[tuple[bytes, int], CopiedPrefix] = {}
        self._lengths: defaultdict[bytes, Counter[int]] = defaultdict(Counter)  # blocks of the prefixes, per namespace
        self._waiting: list[tuple[bytes, int]] = []  # for their turn in this round

    def __len__(self) -> int:
        return len(self._prefixes)

    def add(self, kv_namespace: bytes, chain: bytes, target: str, match_key: int) -> CopiedPrefix:
        """The prefix was copied to `target`."""
        fresh = CopiedPrefix(kv_namespace, keys_from_bytes(chain).copy())
        prefix = self._prefixes.get(fresh.name)
        if prefix is None:
            if len(self._prefixes) >= _MAX_PREFIXES:
                self.forget(next(iter(self._prefixes.values())))
            prefix = self._prefixes[fresh.name] = fresh
            self._lengths[kv_namespace][len(fresh.chain)] += 1
        prefix.targets[target] = match_key
        return prefix

    def take_turn(self, num_blocks: int) -> list[CopiedPrefix]:
        """The next prefixes, until they have so many blocks together; each comes once in a round."""
        taken, left = [], num_blocks
        if not self._waiting:
            self._waiting = list(self._prefixes)
        while self._waiting and left > 0:
            prefix = self._prefixes.get(self._waiting.pop())
            if prefix is not None:
                taken.append(prefix)
                left -= len(prefix.chain)
        return taken

    def not_told(self, pool: str) -> None:
        """The pool node knows nothing of other holders: it has joined anew."""
        for prefix in self._prefixes.values():
            prefix.told -= {pool}

    def within(self, kv_namespace: bytes, keys: NDArray[np.uint64]) -> dict[str, int]:
        """Of a prompt's blocks (uint64 [n]): per pool node that has some of them by a Copy, that Copy's match_key."""
        found: dict[str, int] = {}
        for length in sorted(self._lengths.get(kv_namespace, ())):
            if length <= len(keys):
                prefix = self._prefixes.get((kv_namespace, int(keys[length - 1])))
                found.update(prefix.targets if prefix is not None else {})
        return found

    def shrink(self, target: str, match_key: int) -> CopiedPrefix | None:
        """The copy at `target` is to go: the prefix, of which that is no copy any more. None: it is not known."""
        for prefix in self._prefixes.values():
            if prefix.targets.get(target) == match_key:
                del prefix.targets[target]
                return prefix
        return None

    def forget(self, prefix: CopiedPrefix) -> None:
        """The prefix is one as any other."""
        del self._prefixes[prefix.name]
        lengths = self._lengths[prefix.kv_namespace]
        lengths[len(prefix.chain)] -= 1
        if not lengths[len(prefix.chain)]:
            del lengths[len(prefix.chain)]
        if not lengths:
            del self._lengths[prefix.kv_namespace]


log = logging.getLogger(__name__)
_OWNER = "conductor"
_BLOCKS_AT_ONCE = 1 << 16  # of copied prefixes, looked up in one go: some milliseconds


class PoolNodes:
    """One client per joined pool node."""

    def __init__(self, core: Core, incarnation: int, copy_timeout_s: float) -> None:
        self._core = core
        self._incarnation = incarnation
        self._copy_timeout_s = copy_timeout_s
        self.following = DirectoryUpdater()
        self.replicas = CopiedPrefixes()
        self._clients: dict[str, PoolClient] = {}
        self._roster: tuple[str, ...] | None = None  # of the directory, and of it those that have not joined
        self._absent = np.zeros(0, int)
        self._tasks: set[asyncio.Task[None]] = set()  # copies, hints, removals, and clients being closed

    def add(self, node: conductor_pb2.Node) -> None:
        """A pool node joined, perhaps at another address than before."""
        self._disconnect(node.node_id)
        self._clients[node.node_id] = PoolClient(node.target, owner=_OWNER, owner_incarnation=self._incarnation)
        self.following.join(node.node_id, node.target)
        self.replicas.not_told(node.node_id)

    def remove(self, node_id: str) -> None:
        """A pool node has left: nothing can be had there any more."""
        self._disconnect(node_id)
        self.following.leave(node_id)

    @property
    def directory(self) -> Directory:
        """Of all pool nodes that are followed."""
        return self.following.directory

    def match(self, kv_namespace: bytes, keys: NDArray[np.uint64]) -> Matches:
        """What each joined pool node that holds any holds of the chain's leading blocks."""
        matches = self.directory.match(kv_namespace, keys)
        if matches.roster is not self._roster:
            self._roster = matches.roster
            self._absent = np.array([i for i, node_id in enumerate(self._roster) if node_id not in self._clients], int)
        if len(self._absent):
            held = matches.held
            held[:, self._absent] = 0
            return Matches(matches.roster, held, int(held[0].max(initial=0)))
        return matches

    def start_copy(self, copy: Copy, kv_namespace: bytes, chain: bytes) -> None:
        """Carry out a copy in the background; the policy hears of its end."""
        source, target = self._clients[copy.source], self._clients[copy.target]
        keys = keys_from_bytes(chain)[: copy.num_blocks]
        self._spawn(self._copy(copy, source.target, target, kv_namespace, keys))

    def shrink(self, shrink: Shrink) -> None:
        """Drop a copy that is used no more, in the background, unless it may be the last one by now."""
        prefix = self.replicas.shrink(shrink.pool, shrink.match_key)
        if prefix is None or shrink.pool not in self._clients:
            return
        others = self._holders(prefix) - prefix.leaving - {shrink.pool}
        if any(self.directory.state(pool) is DirectoryState.EXACT for pool in others):
            prefix.leaving |= {shrink.pool}
            brought = prefix.chain[shrink.keep_blocks :]
            self._spawn(self._drop(self._clients[shrink.pool], shrink.pool, prefix.kv_namespace, brought))

    def tell_replicas(self) -> None:
        """Where the holders of a copied prefix are others than before, let each know how many there are besides.

        Where there are very many prefixes, a part of them at each call.
        """
        account = self._core.policy.replication
        for prefix in self.replicas.take_turn(_BLOCKS_AT_ONCE):
            prefix.targets = {pool: key for pool, key in prefix.targets.items() if account.of(pool, key) is not None}
            holders = self._holders(prefix)
            prefix.leaving &= holders
            if holders != prefix.told:
                prefix.told = holders
                for pool in sorted(holders):
                    self._spawn(self._hint(self._clients[pool], prefix, pool, len(holders) - 1))
            if len(holders) < 2 and not prefix.targets:
                self.replicas.forget(prefix)

    @property
    def num_copies(self) -> int:
        """Copies under way, and what else is being told to pool nodes."""
        return len(self._tasks)

    def state(self) -> dict[str, Any]:
        """For export: how much is known of each pool node, and how sure it is."""
        return self.following.state()

    def samples(self) -> Iterator[conductor_pb2.Sample]:
        """The same as numbers, and what copying hot prefixes cost and saved."""
        yield from self.following.samples()
        account = self._core.policy.replication
        yield sample("replicas", len(account))
        yield sample("replication_saved_seconds_total", account.saved_s)
        yield sample("replication_spent_seconds_total", account.spent_s)

    def validate(self) -> list[str]:
        """What does not fit together in the directory."""
        return self.directory.validate()

    async def close(self) -> None:
        """End feeds and copies, disconnect."""
        for node_id in list(self._clients):
            self._disconnect(node_id)
        await self.following.close()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _disconnect(self, node_id: str) -> None:
        client = self._clients.pop(node_id, None)
        self._roster = None
        if client is not None:
            self._spawn(client.close())

    async def _copy(
        self, copy: Copy, source_target: str, target: PoolClient, kv_namespace: bytes, keys: NDArray[np.uint8]
    ) -> None:
        loop = asyncio.get_running_loop()
        began_s, nbytes = loop.time(), 0
        try:
            num_blocks, nbytes = await target.copy(kv_namespace, keys, source_target, self._copy_timeout_s)
            log.info("copied %d hot blocks from %s to %s", num_blocks, copy.source, copy.target)
        except (KvPoolError, NetworkError) as error:
            log.warning("hot blocks not copied from %s to %s: %s", copy.source, copy.target, error)
        else:
            if num_blocks:
                self.replicas.add(kv_namespace, keys.tobytes(), copy.target, copy.match_key)
        finally:
            # Whatever happened, also when the client was closed meanwhile: else the policy would count on it for ever.
            seconds = loop.time() - began_s
            self._core.handle(CopyFinished(copy.source, copy.target, copy.match_key, nbytes, seconds))

    async def _drop(self, client: PoolClient, pool: str, kv_namespace: bytes, brought: NDArray[np.uint8]) -> None:
        try:
            removed = await client.evict(kv_namespace, brought)
            log.info("dropped %d of %d copied blocks at %s, which nobody used", removed, len(brought), pool)
        except (KvPoolError, NetworkError) as error:
            log.warning("copied blocks were not dropped at %s, which may evict them itself: %s", pool, error)

    async def _hint(self, client: PoolClient, prefix: CopiedPrefix, pool: str, others: int) -> None:
        try:
            await client.hint(prefix.kv_namespace, prefix.chain, [others] * len(prefix.chain))
        except (KvPoolError, NetworkError) as error:
            prefix.told -= {pool}
            log.info("%s was not told of %d other holders: %s", pool, others, error)

    def _holders(self, prefix: CopiedPrefix) -> frozenset[str]:
        """The joined pool nodes that have all of it."""
        held = self.match(prefix.kv_namespace, keys_u64(prefix.chain))
        return frozenset(pool for pool, match in held.items() if match.blocks == len(prefix.chain))

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
