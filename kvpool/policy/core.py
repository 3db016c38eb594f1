"""State of a pool node and all decisions on it: puts, leases, removal. No I/O and no clock: `now_ns` is an argument.

Times are in nanoseconds of one monotonic clock. A put allocates slots that are invisible until it is sealed: then its
blocks become visible and an event is logged. If it ends unsealed (aborted, expired), its slots are fenced, because its
writer may still be writing. They are freed when the caller has revoked the put's key, which ends every write under it,
and calls `fence_revoked`.

A lease protects blocks from eviction and their slots from reuse until it is released, or until the longest deadline of
an operation has passed after its expiry.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvpool.address import KEY_NBYTES
from kvpool.errors import AddressError, PoolConfigError, PoolRefused, PutLost, SpecError
from kvpool.policy.audit import audit
from kvpool.policy.counters import PolicyMetrics
from kvpool.policy.event_log import EventLog
from kvpool.policy.eviction import POLICIES, RetainRequest, Use
from kvpool.policy.records import (
    Block,
    BlockCopy,
    LeaseGrant,
    LeaseRecord,
    LoadOutcome,
    MissingRun,
    NewBlocks,
    PutAllocation,
    PutRecord,
    PutRequest,
    SlotStatus,
    SsdBlock,
    TierLoad,
    TierWrite,
)
from kvpool.policy.resizing import Resizing
from kvpool.policy.slabs import SlabAllocator
from kvpool.policy.staging import Staging
from kvpool.policy.store import BlockStore, flush


@dataclass(frozen=True)
class PoolLimits:
    """Sizes in bytes, times in nanoseconds."""

    arena_nbytes: int
    slab_nbytes: int  # unit of the arena from which slabs, each for slots of one size, are made
    operation_ns: int  # the longest deadline of a messenger operation
    max_lease_ns: int  # longer leases and puts are cut to this
    event_log_nbytes: int = 16 << 20  # memory for events kept for reconnecting directories
    policy: str = "lru"  # of eviction, by its name in `kvpool.policy.eviction`; each tier has its own instance
    ssd_nbytes: int = 0  # for extents; 0: no SSD tier
    ssd_slab_nbytes: int = 1 << 20  # as `slab_nbytes`; must stay the same as long as the SSD store's files are kept
    write_above: float = 0.5  # share of DRAM in use above which the next victims are written to SSD before eviction
    least_nbytes: int | None = None  # what the arena may be shrunk to; None: it is not shrunk
    max_tails: int = 1024  # partial blocks kept after one block; many dialogues may end after a prompt they share
    quotas: Mapping[bytes, float] = field(default_factory=dict)  # namespace -> largest share of DRAM it may take
    retained_share: float = 0.75  # of each tier, the most that prefixes announced by `retain` may take
    retained_tenant_share: float = 0.5  # likewise, those of one tenant

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise PoolConfigError(f"eviction policy {self.policy!r}: expected one of {', '.join(sorted(POLICIES))}")
        if wrong := [share for share in self.quotas.values() if not 0 < share <= 1]:
            raise PoolConfigError(f"a namespace's quota is a share of DRAM above 0 and at most 1, not {wrong[0]!r}")
        if not 0 <= self.retained_share <= 1 or not 0 <= self.retained_tenant_share <= 1:
            raise PoolConfigError("retained_share and retained_tenant_share must be shares of 0..1")
        if not 0 <= self.write_above <= 1 or self.max_tails < 0 or self.ssd_nbytes < 0 or self.ssd_slab_nbytes < 1:
            raise PoolConfigError("write_above is a share of 0..1; max_tails and sizes must not be negative")


_LEAST_S, _MOST_S = 1e-9, 1e6  # range of computing times, so that the policies' arithmetic stays finite


def check_request(request: PutRequest) -> None:
    """Raise AddressError unless there is one parent per block and, if given, one valid number of tokens per block."""
    chain, parents, num_tokens = request.chain, request.parents, request.num_tokens
    if len(parents) != len(chain):
        raise AddressError(f"{len(chain)} blocks with {len(parents)} parents: expected one parent per block")
    if num_tokens and len(num_tokens) != len(chain):
        raise AddressError(f"{len(chain)} blocks with {len(num_tokens)} numbers of tokens: expected one per block")
    block_tokens = request.spec.block_tokens
    if any(num_tokens) and (wrong := [n for n in num_tokens if not 0 <= n < block_tokens]):
        raise AddressError(
            f"a partial block of {wrong[0]} tokens: expected 1..{block_tokens - 1}, or 0 for a full block"
        )


def request_blocks(store: BlockStore, kv_namespace: bytes, chain: Sequence[bytes], parents: Sequence[bytes]) -> int:
    """Return the number of blocks from the prompt's first to the last of `chain`, as far as the prompt is known."""
    before = store.find(kv_namespace, parents[0]) if parents else None
    return len(chain) + (before.prefix_node.depth + 1 if before is not None else 0)


def missing_run_end(found: Sequence[Block | None], request: PutRequest, start: int) -> int:
    """Return the end of the blocks from `start` on that are all missing and follow each other."""
    stop, chain, parents = start + 1, request.chain, request.parents
    while stop < len(found) and found[stop] is None and parents[stop] == chain[stop - 1]:
        stop += 1
    return stop


def cost_of_each(compute_s: float, num_blocks: int) -> float:
    """Return the seconds that computing one of the blocks took, 0 = unknown. Raises PoolRefused if out of range."""
    if not 0 <= compute_s <= _MOST_S:
        raise PoolRefused(f"compute_s must be a number of seconds from 0 to {_MOST_S:.0f}, not {compute_s!r}")
    each = compute_s / max(1, num_blocks)
    return each if each >= _LEAST_S else 0.0


def check_digests(blocks: Sequence[Block], digests: Sequence[tuple[bytes, ...]]) -> None:
    """Raise SpecError unless there are digests of the right length per block and group."""
    if len(digests) != len(blocks):
        raise SpecError(f"expected digests for the put's {len(blocks)} new blocks, got digests for {len(digests)}")
    want = blocks[0].namespace.digests_nbytes
    for per_group in digests:
        if tuple(map(len, per_group)) != want:
            raise SpecError(
                f"expected digests per group of {list(want)} bytes, got {[len(each) for each in per_group]}"
            )


def _kept(
    blocks: list[Block], digests: Sequence[tuple[bytes, ...]], keep: Sequence[bool] | None
) -> tuple[list[Block], Sequence[tuple[bytes, ...]]]:
    """Return the blocks whose `keep` is not False, and their digests."""
    if keep is None or all(keep):
        return blocks, digests
    kept = [i for i, keep_block in enumerate(keep) if keep_block]
    return [blocks[i] for i in kept], [digests[i] for i in kept]


_NO_PARENT = bytes(KEY_NBYTES)
MOST_RETAINED_NS = 24 * 3600 * 10**9
LOAD_AHEAD_NS = 2 * 10**9  # loads from SSD begin this long before the expected use
_MAX_RETURNS_NBYTES = 32 << 20  # of the chains of announced prefixes that wait for `due_loads`
_PAGE_NBYTES = 4096  # extents on SSD start at multiples of it


class PoolCore:
    """State of one incarnation of a pool node. Chain keys are 16 bytes; a first block's parent is 16 zero bytes."""

    def __init__(self, limits: PoolLimits, incarnation: int) -> None:
        self.limits = limits
        self.log = EventLog(incarnation, limits.event_log_nbytes)
        self.metrics = PolicyMetrics()
        self.counters = self.metrics.counters
        self.store = BlockStore(
            SlabAllocator(limits.arena_nbytes, limits.slab_nbytes),
            SlabAllocator(limits.ssd_nbytes, limits.ssd_slab_nbytes, alignment=_PAGE_NBYTES, aligned_slabs=True),
            limits.policy,
            (limits.retained_share, limits.retained_tenant_share),
            {namespace: int(share * limits.arena_nbytes) for namespace, share in limits.quotas.items()},
            limits.max_tails,
            self.log,
            self.metrics,
        )
        self.staging = Staging(self.store, self.metrics, limits.write_above, limits.least_nbytes)
        self.resizing = Resizing(self.store, self._resized)
        self.puts: dict[str, PutRecord] = {}
        self.leases: dict[str, LeaseRecord] = {}
        self.fenced: dict[str, list[int]] = {}  # per ended put: offsets of the slots it left unsealed
        self._serial = 0
        self._returns: list[tuple[int, int, bytes, bytes, RetainRequest]] = []  # heap of `due_loads`, with whole chains
        self._returns_nbytes = 0  # of the chains

    def allocate(
        self, now_ns: int, request: PutRequest, *, owner: str, owner_incarnation: int, ttl_ns: int
    ) -> PutAllocation:
        """Allocate slots as `add`, for a put that its owner ends by `seal` or `abort` within `ttl_ns`."""
        new = self.add(now_ns, request)
        if not new.blocks:
            return PutAllocation("", tuple(new.status))
        put_id = self.track(now_ns, new, owner=owner, owner_incarnation=owner_incarnation, ttl_ns=ttl_ns)
        return PutAllocation(put_id, tuple(new.status), tuple(new.blocks))

    def add(self, now_ns: int, request: PutRequest) -> NewBlocks:
        """Allocate slots for the missing blocks, in order, evicting others. After a NO_SPACE, no later block is NEW.

        The next call must be `seal_new`, `drop_new` or `track`, apart from `take_dram_changes`. A block that is only on
        SSD counts as EXISTS. A partial block beyond `PoolLimits.max_tails` evicts the oldest partial block after the
        same parent. Raises SpecMismatch if the namespace has another spec here, SpecError if none of its blocks could
        ever fit, AddressError if parents or token counts do not match the blocks, PoolRefused for a `compute_s` out of
        range.
        """
        check_request(request)
        kv_namespace, chain, parents = request.kv_namespace, request.chain, request.parents
        cost_s = cost_of_each(request.compute_s, len(chain))
        store = self.store
        if len(parents) > 1 and parents[1] == _NO_PARENT:  # the blocks of a window
            store.dram.keep_to_recency()
            store.ssd.keep_to_recency()
        index = store.index
        namespace = store.namespaces.of(kv_namespace, request.spec)
        keys = [kv_namespace + chain_key for chain_key in chain]
        after = kv_namespace + parents[0] if parents else None
        use = Use(now_ns, request_blocks(store, kv_namespace, chain, parents), stores=True, after=after)
        found = index.find(keys)
        status: list[SlotStatus] = []
        new_blocks: list[Block] = []
        runs: list[MissingRun] = []
        full = False
        last: Block | None = None
        expected = 0  # blocks up to here are stored, or the eviction policy expects them
        kept = store.hold_after_gap(found)
        i = -1
        while (i := i + 1) < len(found):
            known = found[i]
            prefix_node = known.prefix_node if known is not None else index.node_at(keys[i])
            block = prefix_node.block  # not `known`: a key may come twice
            if block is not None:
                if not block.put_id:
                    store.expect(runs, use)
                    store.hit([block], use)
                status.append(SlotStatus.EXISTS)
            elif full:
                index.discard(prefix_node)
                status.append(SlotStatus.NO_SPACE)
            else:
                is_next = last is not None and parents[i] == chain[i - 1]
                before = last.prefix_node if is_next and last else index.node_at(kv_namespace + parents[i])
                tokens = request.num_tokens[i] if request.num_tokens else 0
                if i >= expected:
                    expected = missing_run_end(found, request, i)
                    last_tokens = request.num_tokens[expected - 1] if request.num_tokens else 0
                    runs.append(MissingRun(namespace, before, keys[i:expected], last_tokens))
                    added = [] if request.num_tokens else store.add_run(namespace, keys[i:expected], before, cost_s)
                    if added:
                        new_blocks += added
                        status += [SlotStatus.NEW] * len(added)
                        i += len(added) - 1
                        last = added[-1]
                        continue
                store.expect(runs, use)
                block = store.try_add(namespace, prefix_node, before, tokens, cost_s, use)
                full = block is None
                status.append(SlotStatus.NO_SPACE if block is None else SlotStatus.NEW)
                if block is not None:
                    new_blocks.append(block)
            last = block
        store.release_all(kept)
        store.log_changes()
        if full:
            self.counters["no_space_blocks"] += status.count(SlotStatus.NO_SPACE)
        return NewBlocks(status, new_blocks, use, runs)

    def track(self, now_ns: int, new: NewBlocks, *, owner: str, owner_incarnation: int, ttl_ns: int) -> str:
        """Make the blocks those of a put, which its owner ends by `seal` or `abort` within `ttl_ns`. Returns its id."""
        self.store.expect(new.runs, new.use)
        put_id = self._next_id("put")
        for block in new.blocks:
            block.put_id = put_id
        expires_ns = now_ns + min(ttl_ns, self.limits.max_lease_ns)
        self.puts[put_id] = PutRecord(put_id, owner, owner_incarnation, new.blocks, expires_ns, new.use.request_blocks)
        return put_id

    def seal_new(
        self, new: NewBlocks, digests: Sequence[tuple[bytes, ...]], keep: Sequence[bool] | None = None
    ) -> list[Block]:
        """Make blocks visible that `add` returned, as `seal`; return those whose `keep` is not False.

        The next call must be `settle_new` with them, apart from `take_dram_changes`: what nobody has to wait for is
        left to it. No other process may have access to the slots of blocks that are not kept.
        """
        check_digests(new.blocks, digests)
        blocks, digests = _kept(new.blocks, digests, keep)
        self.store.complete(blocks, digests, new.use)
        return blocks

    def settle_new(self, new: NewBlocks, sealed: list[Block]) -> None:
        """Log blocks that `seal_new` sealed, and pass them to the eviction policy; free the slots of all others."""
        self.store.expect(new.runs, new.use)
        self._settle(sealed, new.use)
        self._free_unsealed(new.blocks)

    def drop_new(self, new: NewBlocks) -> None:
        """Drop the blocks that `add` returned; their slots are free at once."""
        self.store.expect(new.runs, new.use)
        self._free_unsealed(new.blocks)
        self.counters["aborted_puts"] += 1

    def seal(
        self, now_ns: int, put_id: str, digests: Sequence[tuple[bytes, ...]], keep: Sequence[bool] | None = None
    ) -> int:
        """Make a put's blocks visible; `digests` are given per NEW block and group. Returns the number made visible.

        The put's key must have been revoked. Blocks whose `keep` is False are dropped and their slots fenced under the
        put's id, as in `abort`; `fence_revoked` must follow. Raises PutLost if the put has ended, SpecError if the
        digests do not match the blocks.
        """
        put = self.puts.get(put_id)
        if put is None or put.expires_ns <= now_ns:
            raise PutLost(f"put {put_id!r} has ended (expired, aborted or sealed): allocate again")
        check_digests(put.blocks, digests)
        del self.puts[put_id]
        use = Use(now_ns, put.request_blocks, stores=True)
        sealed, kept_digests = _kept(put.blocks, digests, keep)
        self.store.complete(sealed, kept_digests, use)
        self._settle(sealed, use)
        if len(sealed) < len(put.blocks):
            self._fence(put_id, [block for block in put.blocks if not block.sealed])
        return len(sealed)

    def abort(self, put_id: str) -> bool:
        """End a put unsealed; its slots stay fenced until `fence_revoked`. Returns False if there is no such put."""
        put = self.puts.pop(put_id, None)
        if put is not None:
            self._fence(put_id, put.blocks)
            self.counters["aborted_puts"] += 1
        return put is not None

    def fence_revoked(self, put_id: str) -> None:
        """Free the unsealed slots of an ended put. Must follow the revocation of the put's key."""
        self.store.dram.free_slots(self.fenced.pop(put_id, []))

    def pin(
        self,
        now_ns: int,
        kv_namespace: bytes,
        chain: Sequence[bytes],
        *,
        owner: str,
        owner_incarnation: int,
        lease_ns: int,
        tails: bool = False,
        tail_keys: Sequence[bytes] = (),
    ) -> LeaseGrant | None:
        """Lease the longest leading run of sealed blocks in DRAM; return None if there is nothing to lease.

        With `tails`, partial blocks in DRAM whose parent is the run's last block are leased too; after an empty run,
        those that begin a prompt. The first of `tail_keys` that exists is leased, otherwise a few, most recently used
        first. The grant may have tails and no blocks.
        """
        run, num_from_ssd = self._look_up(now_ns, kv_namespace, chain)
        after = self.store.tails_after(kv_namespace, run, tail_keys) if tails else []
        after = [tail for tail in after if tail.offsets]
        if not run and not after:
            return None
        copies = [copy for block in (*run, *after) if (copy := block.dram) is not None]
        for copy in copies:
            copy.holds += 1
        self.counters["lookup_tails"] += len(after)
        self.store.hit(after, Use(now_ns, len(chain)))
        lease_id = self._next_id("lease")
        expires_ns, kept_until_ns = self._lease_times(now_ns, lease_ns)
        self.leases[lease_id] = LeaseRecord(lease_id, owner, owner_incarnation, copies, expires_ns, kept_until_ns)
        return LeaseGrant(lease_id, tuple(run), expires_ns, tuple(after), num_from_ssd)

    def last_window(self, now_ns: int, kv_namespace: bytes, chain: Sequence[bytes], window_blocks: int) -> range:
        """Return the last `window_blocks` blocks of `chain` that follow each other and are sealed, in any tier.

        If the leading run has no more, all of it; if it is empty, too, the look-up is counted here.
        """
        seen = self.store.index.last_window(kv_namespace, chain, window_blocks)
        if not seen and chain:
            self.metrics.record_lookup(min(len(chain), window_blocks), 0, [], now_ns)
        return seen

    def use(self, now_ns: int, kv_namespace: bytes, chain: Sequence[bytes]) -> None:
        """Count a look-up of blocks that were read, and verified by their digests, without a lease."""
        self._look_up(now_ns, kv_namespace, chain)

    def hint(self, now_ns: int, kv_namespace: bytes, chain: Sequence[bytes], other_replicas: Sequence[int]) -> None:
        """Record how many other nodes hold each of the blocks; unknown blocks are ignored.

        Raises AddressError unless there is one number per block.
        """
        if len(other_replicas) != len(chain):
            raise AddressError(f"{len(chain)} blocks with {len(other_replicas)} numbers of replicas")
        for chain_key, replicas in zip(chain, other_replicas, strict=True):
            self.store.set_replicas(kv_namespace, chain_key, replicas)

    def retain(self, now_ns: int, kv_namespace: bytes, chain: Sequence[bytes], request: RetainRequest) -> bool:
        """Keep a prefix in preference over other blocks; see `kvpool.policy.eviction.retention`.

        If the pause before its next use is known, `due_loads` returns it shortly before. Returns False if DRAM has no
        room for it now beside the tenant's other retained prefixes. Raises PoolRefused for times out of range.
        """
        if not 0 < request.lifetime_ns <= MOST_RETAINED_NS or not 0 <= request.pause_ns <= MOST_RETAINED_NS:
            raise PoolRefused(
                f"lifetime_s must be above 0 and pause_s at least 0, both at most {MOST_RETAINED_NS // 10**9}, got "
                f"{request.lifetime_ns / 1e9:g} and {request.pause_ns / 1e9:g}"
            )
        has_place = self._returns_nbytes + 16 * len(chain) <= _MAX_RETURNS_NBYTES
        if self.limits.ssd_nbytes and request.pause_ns > LOAD_AHEAD_NS and has_place:
            self._serial += 1
            self._returns_nbytes += 16 * len(chain)
            at_ns = now_ns + request.pause_ns - LOAD_AHEAD_NS
            heapq.heappush(self._returns, (at_ns, self._serial, kv_namespace, b"".join(chain), request))
        return self.store.retain(now_ns, kv_namespace, chain, request)

    def retained(self, now_ns: int, tier: int) -> list[tuple[str, int, int]]:
        """Return (tenant, number of its retained prefixes, their bytes) in a tier, most bytes first."""
        retention = self.store.spaces[tier].retention
        retention.expire(now_ns)
        return sorted(retention.by_tenant(), key=lambda each: (-each[2], each[0]))

    def await_use(self, now_ns: int, kv_namespace: bytes, chain: Sequence[bytes]) -> None:
        """Record that a request with this prompt has arrived and waits: its retained prefixes are used next."""
        self.store.await_use(now_ns, kv_namespace, chain)

    def due_loads(self, now_ns: int) -> list[tuple[bytes, tuple[bytes, ...]]]:
        """Return the announced prefixes, as namespace and chain, whose next use is expected shortly.

        Each is returned once, and retained again as one that is used soon: the caller should `load` it from SSD.
        """
        due: list[tuple[bytes, tuple[bytes, ...]]] = []
        while self._returns and self._returns[0][0] <= now_ns:
            _, _, kv_namespace, whole, request = heapq.heappop(self._returns)
            self._returns_nbytes -= len(whole)
            chain = tuple(whole[i : i + 16] for i in range(0, len(whole), 16))
            left_ns = request.lifetime_ns - request.pause_ns + LOAD_AHEAD_NS
            if left_ns > 0:
                again = replace(request, lifetime_ns=left_ns, pause_ns=min(LOAD_AHEAD_NS, left_ns))
                self.store.retain(now_ns, kv_namespace, chain, again)
                due.append((kv_namespace, chain))
        return due

    def load(
        self,
        now_ns: int,
        kv_namespace: bytes,
        chain: Sequence[bytes],
        *,
        tails: bool = False,
        tail_keys: Sequence[bytes] = (),
    ) -> list[TierLoad]:
        """Start loads of those blocks of the leading run, and of tails as in `pin`, that are on SSD only.

        Slots are allocated in order, as far as possible, by evicting blocks outside the run. Blocks in flight are not
        returned again. Every load must be followed by `loaded`.
        """
        return self.staging.load(now_ns, kv_namespace, chain, tails, tail_keys)

    def loaded(self, now_ns: int, load: TierLoad, outcome: LoadOutcome) -> None:
        """Record the end of a load.

        OK: the block is in DRAM and on SSD. IO_ERROR: it stays on SSD; after the second in a row it is removed.
        CORRUPT: it is quarantined.
        """
        self.staging.loaded(now_ns, load, outcome)

    def num_loading(self, kv_namespace: bytes, chain: Sequence[bytes]) -> int:
        """Return the number of these blocks that are being loaded from SSD to DRAM."""
        return self.staging.num_loading(kv_namespace, chain)

    def writes(self, now_ns: int, max_nbytes: int, *, everything: bool = False) -> list[TierWrite]:
        """Return the blocks to write to SSD now, parents before children, up to `max_nbytes` of extents.

        If there are any, at least one is returned. First come DRAM's next victims, once more than
        `PoolLimits.write_above` of it is used; then blocks that were used again, as long as extents are free. With
        `everything`, all sealed blocks that are not on SSD are written. If the SSD is full, blocks are evicted from it
        instead: `take_ssd_freed` returns their extents, and the next call uses them. Every write must be followed by
        `written`. Never delays or fails a put.
        """
        return self.staging.next_writes(now_ns, max_nbytes, everything)

    def written(self, now_ns: int, write: TierWrite, ok: bool, *, block_at_fault: bool = True) -> None:
        """Record the end of a write. If `ok`, the block is durable on SSD; otherwise its extent is freed.

        After two failures in a row with `block_at_fault`, the block is not written again. Failures of the SSD itself
        (full, I/O error) do not count.
        """
        self.staging.written(now_ns, write, ok, block_at_fault)

    def restore(self, now_ns: int, entries: Sequence[SsdBlock]) -> int:
        """Add the blocks that the SSD store recovered. Must precede all other calls. Returns the number added.

        Blocks that cannot be added (beyond the capacity, overlapping, with another spec than their namespace) are
        counted as `ssd_refused_blocks`, and their extents are freed.
        """
        return self.staging.restore(now_ns, entries)

    def take_ssd_freed(self) -> list[int]:
        """Return the offsets of extents given up since the last call, each once.

        Later calls of `writes` reuse them: the SSD store must have freed them durably before such a write.
        """
        return self.store.ssd.take_freed()

    def take_dram_changes(self) -> list[tuple[bool, Block]]:
        """Return the visible additions to DRAM (True) and removals from it (False), in order, since the last call.

        The first call returns all blocks in DRAM and starts the recording. A removed block may still have leased slots.
        """
        return self.store.take_dram_changes()

    def flush(self, now_ns: int, kv_namespace: bytes | None, *, dram_only: bool) -> tuple[int, int]:
        """Remove unused blocks of one namespace, or of all (None).

        With `dram_only`, only the DRAM copies of blocks that are also on SSD are dropped. Returns (number of blocks
        removed or dropped, number of matching blocks that remain in the pool or, with `dram_only`, in DRAM).
        """
        return flush(self.store, kv_namespace, dram_only=dram_only)

    def totals(self) -> dict[str, int]:
        """Return all counters since the start, histograms as cumulative buckets. No value ever decreases."""
        return self.metrics.totals() | {
            "retained_preempted": self.store.dram.retention.num_preempted,
            "retained_refused": self.store.dram.retention.num_refused,
        }

    def renew(self, now_ns: int, lease_id: str, lease_ns: int) -> bool:
        """Extend a lease to `lease_ns` from now. Returns False if it has expired."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.expires_ns <= now_ns:
            return False
        lease.expires_ns, lease.kept_until_ns = self._lease_times(now_ns, lease_ns)
        return True

    def unpin(self, lease_id: str) -> bool:
        """End a lease whose owner has no reads in flight. Returns False if there is no such lease."""
        lease = self.leases.pop(lease_id, None)
        if lease is not None:
            self.store.release_all(lease.copies)
        return lease is not None

    def evict(self, kv_namespace: bytes, chain: Sequence[bytes]) -> int:
        """Remove those of the blocks that are evictable, last first, from all tiers. Returns the number removed."""
        removed = 0
        for chain_key in reversed(chain):
            block = self.store.find(kv_namespace, chain_key)
            if block is not None and self.store.may_remove(block):
                self.store.evict(block, "asked")
                removed += 1
        self.store.log_changes()
        return removed

    def quarantine(self, kv_namespace: bytes, chain: Sequence[bytes]) -> int:
        """Remove corrupt sealed blocks, leased or not, so that they are not found again. Returns the number removed."""
        removed = 0
        for chain_key in chain:
            block = self.store.find(kv_namespace, chain_key)
            if block is not None and block.sealed:
                self.store.remove(block)
                removed += 1
        self.store.log_changes()
        self.counters["quarantined_blocks"] += removed
        return removed

    def drop_ssd_only(self, kv_namespace: bytes, chain: Sequence[bytes]) -> int:
        """Remove those of the blocks that are only on an SSD that cannot be read. Returns the number removed."""
        found = (self.store.find(kv_namespace, chain_key) for chain_key in chain)
        unreadable = [block for block in found if block is not None and block.sealed and block.dram is None]
        for block in unreadable:
            self.store.remove(block)
        self.store.log_changes()
        self.counters["ssd_dropped_blocks"] += len(unreadable)
        return len(unreadable)

    def expire(self, now_ns: int) -> list[str]:
        """End expired puts and leases. Returns the ids of the puts, whose keys the caller must revoke."""
        expired = [put for put in self.puts.values() if put.expires_ns <= now_ns]
        overdue = [lease for lease in self.leases.values() if lease.kept_until_ns <= now_ns]
        return self._end(expired, overdue)

    def forget_owner(self, owner: str, owner_incarnation: int) -> list[str]:
        """End the puts and leases of a process that is gone. Returns as `expire`.

        Another process that still reads under one of these leases detects reused slots by their digests.
        """
        gone = owner, owner_incarnation
        puts = [put for put in self.puts.values() if (put.owner, put.owner_incarnation) == gone]
        leases = [lease for lease in self.leases.values() if (lease.owner, lease.owner_incarnation) == gone]
        return self._end(puts, leases)

    def validate(self) -> list[str]:
        """Return descriptions of all inconsistencies; empty if the state is consistent."""
        return audit(self.store, self.staging, self.puts, self.leases, self.fenced)

    def _resized(self, usable_nbytes: int) -> None:
        self.staging.resized(usable_nbytes)
        self.store.dram.retention.resize(usable_nbytes)

    def _settle(self, sealed: Sequence[Block], use: Use) -> None:
        self.store.settle(sealed, use)
        if self.staging.writes_ahead:
            self.staging.write_ahead(sealed)
        self.counters["stored_blocks"] += len(sealed)

    def _free_unsealed(self, blocks: Sequence[Block]) -> None:
        unsealed = [block for block in blocks if block.put_id]
        if unsealed:
            self.store.dram.free_slots(self.store.remove_unsealed(unsealed))

    def _look_up(self, now_ns: int, kv_namespace: bytes, chain: Sequence[bytes]) -> tuple[list[Block], int]:
        """Look up the leading run in DRAM; record and count its use.

        Returns (the run, the number of its blocks loaded from SSD and not used since).
        """
        store = self.store
        found = store.leading_run(kv_namespace, chain)
        copies: list[BlockCopy] = []
        for block in found:
            copy = block.dram
            if copy is None or not copy.ready:
                break
            copies.append(copy)
        run = found[: len(copies)]
        self.metrics.record_lookup(len(chain), len(found) - len(run), copies, now_ns)
        num_from_ssd = sum(copy.promoted for copy in copies)
        store.hit(run, Use(now_ns, len(chain)))
        self.staging.mark_reused(run)
        return run, num_from_ssd

    def _end(self, puts: list[PutRecord], leases: list[LeaseRecord]) -> list[str]:
        for put in puts:
            del self.puts[put.put_id]
            self._fence(put.put_id, put.blocks)
        for lease in leases:
            del self.leases[lease.lease_id]
            self.store.release_all(lease.copies)
        self.counters["expired_puts"] += len(puts)
        self.counters["expired_leases"] += len(leases)
        return [put.put_id for put in puts]

    def _fence(self, put_id: str, blocks: Sequence[Block]) -> None:
        offsets = self.store.remove_unsealed(blocks)
        if offsets:
            self.fenced[put_id] = offsets

    def _lease_times(self, now_ns: int, lease_ns: int) -> tuple[int, int]:
        expires_ns = now_ns + min(lease_ns, self.limits.max_lease_ns)
        return expires_ns, expires_ns + self.limits.operation_ns

    def _next_id(self, kind: str) -> str:
        self._serial += 1
        return f"{kind}-{self.log.incarnation:x}-{self._serial}"
