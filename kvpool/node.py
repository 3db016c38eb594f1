"""A pool node in its process: policy core, arena and the keys by which others access it. No gRPC.

Threads: all state belongs to one event loop. Calls that block (revoking a key, committing memory, verification, SSD
I/O) run in threads that use the messenger, the SSD store and the arena's bytes, but not the core. Callbacks of the
messenger are passed on to the loop.

Lifetimes of access to the arena:

    readers    one key to the whole region, valid as long as the node. A lease protects slots from reuse, and an elastic
               arena from moving or returning them; a read after the lease's end is detected by its digests
    writers    one key per put, to a window from its first to its last slot:

        allocate ── write_key ── writes ──┬─────────── abort | expiry | owner lost ── key revoked ── fence_revoked
        slots:     held by the put        │              unsealed ones fenced ─────────────────┘ free for reuse
                                          └─ key revoked ── seal: from here on, a block may be evicted at any time
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from kvpool import digest
from kvpool.commit_ahead import CommitAhead
from kvpool.config import PoolNodeConfig
from kvpool.copy_compression import CopyCompression
from kvpool.elastic import ElasticArena
from kvpool.errors import PoolConfigError, PutLost
from kvpool.event_streams import EventStreams
from kvpool.local.shared_index import SharedIndex
from kvpool.memory_readings import MemoryReader
from kvpool.policy import LeaseGrant, NewBlocks, PoolCore, PutAllocation, PutRequest
from kvpool.policy.eviction import make_policy
from kvpool.policy.records import DRAM
from kvpool.ssd_tier import SsdState, SsdTier
from messenger import Endpoint, Messenger, RemoteKey, SharedMemory
from messenger.memory import HugePages

T = TypeVar("T")


class PoolNode:
    """One incarnation of a pool node, from `start` to `close`."""

    def __init__(self, config: PoolNodeConfig, incarnation: int) -> None:
        self.config = config
        self.incarnation = incarnation
        self.core = PoolCore(config.limits, incarnation)
        self.messenger = Messenger(config.messenger, node_id=config.node_id, incarnation=incarnation)
        self.copying = asyncio.Semaphore(config.max_incoming_copies)
        self.num_copies = 0
        self.copy_compression = CopyCompression() if config.pool.pool_copy_compression == "auto" else None
        self.ssd: SsdTier | None = None
        self.elastic: ElasticArena | None = None  # None: the arena keeps its size
        self.counters: defaultdict[str, float] = defaultdict(float)  # of the shell; the core has its own
        self.index: SharedIndex | None = None  # of the arena, for processes of this host; None: no LocalPoolServer
        self.local_socket = ""  # socket of the LocalPoolServer, which hands out arena and index; empty: none
        self.draining = asyncio.Event()  # set from outside: serve until there are no leases, puts or copies, then stop
        self._keys: dict[str, RemoteKey] = {}  # of puts, until revoked
        self._own_reads: dict[str, Future[Any]] = {}  # into slots of this node's own puts
        self.event_streams = EventStreams(self.core.log, self.core.store.snapshot, config.heartbeat_s)
        self._published_seq = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> Endpoint:
        """Reserve the arena, listen, restore the SSD tier, start the sweep.

        Raises AddressInUse, BindFailed, PoolConfigError (SsdFolderError is one) or OSError.
        """
        await asyncio.to_thread(digest.warm_up)
        await asyncio.to_thread(make_policy, self.core.limits.policy, 1)  # compiles or loads its kernels, if it has any
        endpoint = self.messenger.start()
        try:
            self.memory = self._arena()
        except BaseException:
            await asyncio.to_thread(self.messenger.close)
            raise
        if self.config.pool.pool_ssd_dir is not None:
            try:
                self.ssd = await SsdTier.open(
                    self.config, self.core, self.memory.array, self.publish_changes, self.counters
                )
            except BaseException:
                await asyncio.to_thread(self.messenger.close)
                self.memory.close()
                raise
        self._arena_commit = CommitAhead(self.memory)
        if self.config.pool.is_elastic:
            self.elastic = ElasticArena(
                self.core,
                self.memory,
                self._arena_commit,
                MemoryReader(self.config.files_root),
                self.publish_changes,
                self._wake_writes,
                self.counters,
            )
            self._spawn(self.elastic.run())
        self._commit_ahead(0)
        self.region = self.messenger.register(self.memory)
        self.read_key = self.messenger.grant(self.region, 0, self.memory.nbytes, read=True, write=False)
        self._spawn(self._sweep())
        loop = asyncio.get_running_loop()

        def on_peer_lost(node_id: str, incarnation: int) -> None:
            loop.call_soon_threadsafe(self._owner_lost, node_id, incarnation)

        self.messenger.on_peer_lost(on_peer_lost)
        return endpoint

    async def close(self) -> None:
        """Stop tasks, SSD tier and messenger, and free the arena; blocks that were in DRAM only are lost."""
        self.event_streams.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.ssd is not None:
            await self.ssd.close()
        if self.elastic is not None:
            await asyncio.to_thread(self.elastic.close)
        await asyncio.to_thread(self.messenger.close)
        self.memory.close()

    def allocate(self, request: PutRequest, *, owner: str, owner_incarnation: int, ttl_ns: int) -> PutAllocation:
        """Allocate slots as `PoolCore.allocate`; until `write_key` is called, only this process can write to them.

        If the SSD cannot be read, blocks that are only there are allocated again.
        """
        new = self.add(request)
        if not new.blocks:
            return PutAllocation("", tuple(new.status))
        put_id = self.track(new, owner=owner, owner_incarnation=owner_incarnation, ttl_ns=ttl_ns)
        return PutAllocation(put_id, tuple(new.status), tuple(new.blocks))

    def add(self, request: PutRequest) -> NewBlocks:
        """Allocate slots as `PoolCore.add`. Their bytes may be written at once."""
        if self.ssd is not None and self.ssd.state is SsdState.FAILED:
            self.core.drop_ssd_only(request.kv_namespace, request.chain)
        new = self.core.add(time.monotonic_ns(), request)
        self.publish_changes()
        if new.blocks and not self._arena_commit.is_complete:
            self._commit_ahead(max(map(max, new.offsets)) + new.blocks[0].namespace.nbytes[DRAM])
        return new

    def track(self, new: NewBlocks, *, owner: str, owner_incarnation: int, ttl_ns: int) -> str:
        """Make new blocks those of a put as `PoolCore.track`, because they will not be complete at once."""
        return self.core.track(
            time.monotonic_ns(), new, owner=owner, owner_incarnation=owner_incarnation, ttl_ns=ttl_ns
        )

    def seal_new(
        self, new: NewBlocks, digests: Sequence[tuple[bytes, ...]], keep: Sequence[bool]
    ) -> Callable[[], None]:
        """Seal blocks as `PoolCore.seal_new`, whose bytes were written right after `add`; all processes find them now.

        Returns a function that must be called before anything else is done with the node, once nobody waits for it.
        """
        sealed = self.core.seal_new(new, digests, keep)
        self._publish_dram()

        def settle() -> None:
            self.core.settle_new(new, sealed)
            self.publish_changes()

        return settle

    def write_key(self, allocation: PutAllocation) -> RemoteKey:
        """Return a key to write to the slots of an allocation's NEW blocks (at least one), valid until the put ends."""
        spans = [
            (offset, offset + block.spec.slot_nbytes(g))
            for block in allocation.new_blocks
            for g, offset in enumerate(block.offsets)
        ]
        start, end = min(span[0] for span in spans), max(span[1] for span in spans)
        key = self.messenger.grant(self.region, start, end - start, read=False, write=True)
        self._keys[allocation.put_id] = key
        return key

    def own_read(self, put_id: str, start: Callable[[], Future[T]]) -> Future[T]:
        """Call `start`, which reads into the slots of this node's own put; they stay fenced until its future is done.

        Raises PutLost, without calling `start`, if the put has ended.
        """
        if put_id not in self.core.puts:
            raise PutLost(f"put {put_id!r} ended before its blocks were read")
        future = self._own_reads[put_id] = start()
        return future

    async def seal(self, put_id: str, digests: Sequence[tuple[bytes, ...]], keep: Sequence[bool] | None = None) -> int:
        """Seal as `PoolCore.seal`, once nobody can write to the blocks any more: a sealed block may be evicted at once,
        and its slots reused.
        """
        await self._revoked(put_id)
        sealed = self.core.seal(time.monotonic_ns(), put_id, digests, keep)
        self.publish_changes()
        self.core.fence_revoked(put_id)
        return sealed

    def seal_now(self, put_id: str, digests: Sequence[tuple[bytes, ...]], keep: Sequence[bool]) -> int:
        """Seal a put that has no write key and whose bytes are complete; it ends at once."""
        sealed = self.core.seal(time.monotonic_ns(), put_id, digests, keep)
        self._own_reads.pop(put_id, None)
        self.publish_changes()
        self.core.fence_revoked(put_id)
        return sealed

    async def abort(self, put_id: str) -> None:
        """Abort as `PoolCore.abort`; on return the slots are free."""
        if self.core.abort(put_id):
            await self._revoked(put_id)

    async def pin(
        self,
        kv_namespace: bytes,
        chain: Sequence[bytes],
        *,
        owner: str,
        owner_incarnation: int,
        lease_ns: int,
        wait_s: float = 0.0,
        tails: bool = False,
        tail_keys: Sequence[bytes] = (),
    ) -> LeaseGrant | None:
        """Pin as `PoolCore.pin`, after blocks on SSD were loaded or `wait_s` has passed.

        Leased blocks are read with `read_key`.
        """
        if wait_s > 0 and self.ssd is not None:
            loader = self.ssd.loader
            await loader.bring(kv_namespace, chain, tails=tails, wait_s=wait_s, tail_keys=tail_keys)
        return self.core.pin(
            time.monotonic_ns(),
            kv_namespace,
            chain,
            owner=owner,
            owner_incarnation=owner_incarnation,
            lease_ns=lease_ns,
            tails=tails,
            tail_keys=tail_keys,
        )

    def prefetch(self, kv_namespace: bytes, chain: Sequence[bytes], tail_keys: Sequence[bytes] = ()) -> int:
        """Start to load a prompt's blocks and tails from SSD to DRAM, since a request with this prompt waits.

        Returns the number of blocks in flight.
        """
        self.core.await_use(time.monotonic_ns(), kv_namespace, chain)
        return 0 if self.ssd is None else self.ssd.loader.begin(kv_namespace, chain, tails=True, tail_keys=tail_keys)

    async def flush(self, kv_namespace: bytes | None, *, dram_only: bool) -> tuple[int, int]:
        """Flush as `PoolCore.flush`; with `dram_only`, first write unwritten blocks to SSD as far as they fit."""
        if dram_only and self.ssd is not None:
            await self.ssd.write_back.write_everything()
        done = self.core.flush(time.monotonic_ns(), kv_namespace, dram_only=dram_only)
        self.publish_changes()
        return done

    def renew(self, lease_id: str, lease_ns: int) -> bool:
        """Renew as `PoolCore.renew`."""
        return self.core.renew(time.monotonic_ns(), lease_id, lease_ns)

    async def wait_unused(self) -> None:
        """Wait until there are no leases, puts or copies, at most for the longest deadline of a read."""
        deadline_s = time.monotonic() + self.config.operation_s
        while self.core.leases or self.core.puts or self.num_copies:
            if time.monotonic() >= deadline_s:
                return
            await asyncio.sleep(self.config.sweep_s)

    def publish_changes(self) -> None:
        """Update the host's shared index, and wake the event streams if there are new events.

        Must follow every call to the core that may move blocks, before slots that it allocated are written.
        """
        self._publish_dram()
        if self.core.log.seq != self._published_seq:
            self._published_seq = self.core.log.seq
            self.event_streams.wake()
            if self.ssd is not None:
                self.ssd.write_back.wake()

    def _publish_dram(self) -> None:
        if self.index is not None:
            changes = self.core.take_dram_changes()
            if changes:
                self.index.apply(changes)

    @property
    def resident_nbytes(self) -> int:
        """Bytes of memory that the arena has from the kernel; 0 before `start`."""
        return self.memory.resident_nbytes if hasattr(self, "memory") else 0

    @property
    def num_write_keys(self) -> int:
        """Number of write keys that are not revoked yet."""
        return len(self._keys)

    async def _revoked(self, put_id: str) -> None:
        """Revoke a put's key; free its unsealed slots if it has ended. Completes even if the caller is cancelled."""
        await asyncio.shield(self._spawn(self._revoke(put_id)))

    async def _revoke(self, put_id: str) -> None:
        key = self._keys.get(put_id)
        if key is not None:
            await asyncio.to_thread(self.messenger.revoke, key)
            self._keys.pop(put_id, None)
        read = self._own_reads.get(put_id)
        if read is not None:
            await asyncio.gather(asyncio.wrap_future(read), return_exceptions=True)
            self._own_reads.pop(put_id, None)
        self.core.fence_revoked(put_id)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.config.sweep_s)
            for put_id in self.core.expire(time.monotonic_ns()):
                self._spawn(self._revoke(put_id))
            for kv_namespace, chain in self.core.due_loads(time.monotonic_ns()):
                if self.ssd is not None:
                    self.ssd.loader.begin(kv_namespace, chain, tails=True)
            self.publish_changes()

    def _owner_lost(self, node_id: str, incarnation: int) -> None:
        """End the puts and leases of a worker process whose connection was lost."""
        for put_id in self.core.forget_owner(node_id, incarnation):
            self._spawn(self._revoke(put_id))
        self.publish_changes()

    def _arena(self) -> SharedMemory:
        settings = self.config.pool
        huge_pages: HugePages = settings.pool_hugepages
        if settings.is_elastic:
            if self.messenger.endpoint.rdma:
                raise PoolConfigError(
                    "pool_min_bytes below pool_bytes conflicts with rdma, which pins all of the pool's memory: remove "
                    "pool_min_bytes, or set transport to tcp"
                )
            huge_pages = "off" if huge_pages == "off" else "transparent"  # reserved ones cannot be returned
        try:
            return SharedMemory.create(
                settings.pool_bytes, "moonpool-arena", huge_pages, returnable=settings.is_elastic
            )
        except OSError as error:
            if settings.pool_hugepages == "on":
                raise PoolConfigError(f"the arena cannot be made of huge pages: {error.strerror}") from error
            raise

    def _wake_writes(self) -> bool:
        """Start writes to SSD. Returns False if it cannot be written."""
        if self.ssd is None or self.ssd.state is not SsdState.OK:
            return False
        self.ssd.write_back.wake()
        return True

    def _commit_ahead(self, end: int) -> None:
        if self._arena_commit.begins(end):
            self._spawn(asyncio.to_thread(self._arena_commit.run, end))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
