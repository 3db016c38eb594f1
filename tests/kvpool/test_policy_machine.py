"""Any sequence of calls against a model that has bytes: what is visible where, protected, told, and given back."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpool.errors import PutLost
from kvpool.policy import LoadOutcome, PoolCore, PoolLimits, PutRequest, SlotStatus, SsdBlock, TierLoad, TierWrite
from kvpool.policy.eviction import POLICIES
from tests.kvpool import policy_views
from tests.kvpool.policy_views import DIGESTS, NAMESPACES, ROOT, SPEC, SPECS, Address, Told, address, key, path

QUOTA = {b"b" * 16: 0.5}
OPERATION_NS = 20


class PoolMachine(RuleBasedStateMachine):
    leaves = st.integers(1, 11)
    namespaces = st.sampled_from(NAMESPACES)
    spans = st.integers(0, 15)
    picks = st.integers(0, 5)
    owners = st.sampled_from(["v", "w"])

    @initialize(
        room=st.integers(2, 12),
        ssd_room=st.sampled_from([0, 3, 6, 12]),
        policy=st.sampled_from(sorted(POLICIES)),
        write_above=st.sampled_from([0.0, 0.5]),
        least_room=st.sampled_from([None, 1, 2]),
    )
    def start(self, room: int, ssd_room: int, policy: str, write_above: float, least_room: int | None) -> None:
        self.now = 0
        self.limits = PoolLimits(
            room * SPEC.block_nbytes,
            2048,
            OPERATION_NS,
            1000,
            policy=policy,
            ssd_nbytes=ssd_room * 4096,
            ssd_slab_nbytes=4096,
            write_above=write_above,
            least_nbytes=least_room and least_room * SPEC.block_nbytes,
            max_tails=2,
            quotas=QUOTA,
        )
        self.parents: dict[Address, bytes] = {}
        self.extents: dict[int, SsdBlock | None] = {}  # not yet told to be given up; None: nothing durable there
        self.boot([])

    def boot(self, entries: list[SsdBlock]) -> None:
        self.core = PoolCore(self.limits, incarnation=1)
        self.dram: dict[int, object] = {}  # what was written last to the slot that begins there
        self.puts: dict[str, tuple[int, str, list[tuple[Address, tuple[int, ...]]]]] = {}
        self.leases: dict[str, tuple[int, str, dict[int, Address]]] = {}
        self.unrevoked: dict[str, set[int]] = {}  # ended put -> slots that its writer may still write
        self.loads: list[TierLoad] = []
        self.writes: list[TierWrite] = []
        self.told = Told(self.core)
        self.totals: dict[str, int] = {}
        self.before: dict[Address, tuple[bool, bool]] = {}
        self.is_broken = False  # the last call may have removed blocks that others follow
        assert self.core.restore(self.now, entries) == len(entries)

    def protected(self) -> set[int]:
        """Slots that somebody may read or write."""
        slots: set[int] = set()
        for until, _, offsets in self.leases.values():
            slots |= offsets.keys() if self.now < until + OPERATION_NS else set()
        for offsets in self.unrevoked.values():
            slots |= offsets
        for _, _, blocks in self.puts.values():
            slots |= {offset for _, offsets in blocks for offset in offsets}
        for move in [*self.loads, *self.writes]:
            slots |= set(move.offsets)
        return slots

    def seen(self) -> dict[Address, tuple[bool, bool]]:
        return policy_views.seen(self.core)

    @rule(ns=namespaces, leaf=leaves, ttl=spans, owner=owners, tail=st.integers(0, 4))
    def allocate(self, ns: bytes, leaf: int, ttl: int, owner: str, tail: int) -> None:
        chain = path(leaf) + ([key(1000 + 8 * leaf + tail)] if tail else [])
        parents = [ROOT, *chain[:-1]]
        num_tokens = [0] * (len(chain) - 1) + [1] if tail else []
        protected, before = self.protected(), self.seen()
        yields = self.core.resizing.has_high_slots  # then victims may free slots that must not be used again
        got = self.core.allocate(
            self.now,
            PutRequest(ns, SPECS[ns], chain, parents, num_tokens, leaf),
            owner=owner,
            owner_incarnation=1,
            ttl_ns=ttl,
        )
        new = [i for i, status in enumerate(got.status) if status is SlotStatus.NEW]
        assert [b.chain_key for b in got.new_blocks] == [chain[i] for i in new]
        offsets = {offset for block in got.new_blocks for offset in block.offsets}
        assert not protected & offsets
        assert all(offset < self.core.resizing.usable_nbytes for offset in offsets)
        statuses = list(got.status)
        if SlotStatus.NO_SPACE in statuses:
            assert SlotStatus.NEW not in statuses[statuses.index(SlotStatus.NO_SPACE) :]
        if not tail and not yields:
            assert new or self.seen() == before, "something was evicted for nothing"
        assert all(got.status[i] is SlotStatus.EXISTS for i, k in enumerate(chain) if (ns, k) in before and not tail)
        if got.put_id:
            self.dram |= dict.fromkeys(offsets, got.put_id)
            self.parents |= {(ns, chain[i]): parents[i] for i in new}
            blocks = [((ns, chain[i]), block.offsets) for i, block in zip(new, got.new_blocks, strict=True)]
            self.puts[got.put_id] = (self.now + ttl, owner, blocks)

    @rule(ns=namespaces, leaf=leaves, tail=st.sampled_from([0, 0, 1, 2, 3]))
    def store(self, ns: bytes, leaf: int, tail: int) -> None:
        before = set(self.puts)
        self.allocate(ns, leaf, ttl=1, owner="w", tail=tail)
        for put_id in self.puts.keys() - before:
            self.seal(sorted(self.puts).index(put_id), kept=-1)
            self.core.fence_revoked(put_id)
            del self.unrevoked[put_id]

    @rule(pick=picks, kept=st.integers(0, 2**6 - 1))
    def seal(self, pick: int, kept: int) -> None:
        if not self.puts:
            return
        put_id = sorted(self.puts)[pick % len(self.puts)]
        until, _, blocks = self.puts[put_id]
        keep = [bool(kept >> i & 1) for i in range(len(blocks))]
        digests = [DIGESTS[ns] for (ns, _), _ in blocks]
        if until <= self.now:
            try:
                self.core.seal(self.now, put_id, digests, keep)
            except PutLost:
                return
            raise AssertionError("an expired put was sealed")
        assert all(self.dram[offset] == put_id for _, offsets in blocks for offset in offsets)
        assert self.core.seal(self.now, put_id, digests, keep) == sum(keep)
        del self.puts[put_id]
        for (where, offsets), keep_block in zip(blocks, keep, strict=True):
            if keep_block:
                self.dram |= dict.fromkeys(offsets, where)
        self.unrevoked[put_id] = {o for (_, offsets), k in zip(blocks, keep, strict=True) if not k for o in offsets}
        self.is_broken = not all(keep)

    @rule(what=st.integers(0, 9), ns=namespaces, leaf=leaves, pick=picks, span=spans)
    def something_rarer(self, what: int, ns: bytes, leaf: int, pick: int, span: int) -> None:
        rarer = (
            lambda: self.abort(pick),
            lambda: self.revoke(pick),
            lambda: self.owner_is_lost("vw"[pick % 2]),
            lambda: self.use(ns, leaf),
            lambda: self.hint(ns, leaf, pick),
            lambda: self.renew(pick, span),
            lambda: self.evict(ns, leaf),
            lambda: self.quarantine(ns, leaf),
            lambda: self.flush([None, *NAMESPACES][pick % 4], dram_only=bool(span % 2)),
            self.restart,
        )
        rarer[what]()

    def abort(self, pick: int) -> None:
        if not self.puts:
            return
        put_id = sorted(self.puts)[pick % len(self.puts)]
        assert self.core.abort(put_id)
        self.end_put(put_id)

    def end_put(self, put_id: str) -> None:
        _, _, blocks = self.puts.pop(put_id)
        self.unrevoked[put_id] = {offset for _, offsets in blocks for offset in offsets}

    def revoke(self, pick: int) -> None:
        if self.unrevoked:
            put_id = sorted(self.unrevoked)[pick % len(self.unrevoked)]
            self.core.fence_revoked(put_id)
            del self.unrevoked[put_id]

    @rule(step=st.integers(0, 15))
    def time_passes(self, step: int) -> None:
        self.now += step
        due = {put_id for put_id, (until, _, _) in self.puts.items() if until <= self.now}
        assert set(self.core.expire(self.now)) == due
        for put_id in due:
            self.end_put(put_id)
        self.leases = {i: lease for i, lease in self.leases.items() if self.now < lease[0] + OPERATION_NS}

    def owner_is_lost(self, owner: str) -> None:
        mine = {put_id for put_id, put in self.puts.items() if put[1] == owner}
        assert set(self.core.forget_owner(owner, 1)) == mine
        for put_id in mine:
            self.end_put(put_id)
        self.leases = {i: lease for i, lease in self.leases.items() if lease[1] != owner}

    @rule(ns=namespaces, leaf=leaves, lease=spans, owner=owners, tails=st.booleans())
    def pin(self, ns: bytes, leaf: int, lease: int, owner: str, tails: bool) -> None:
        chain, seen = path(leaf), self.seen()
        depth = next((i for i, k in enumerate(chain) if not seen.get((ns, k), (False,))[0]), len(chain))
        got = self.core.pin(self.now, ns, chain, owner=owner, owner_incarnation=1, lease_ns=lease, tails=tails)
        assert [b.chain_key for b in got.blocks] == chain[:depth] if got else depth == 0
        if got:
            after = chain[depth - 1] if depth else ROOT
            there = {k for (n, k), where in seen.items() if n == ns and where[0] and self.parents[n, k] == after}
            wanted = {k for k in there if int.from_bytes(k, "little") >= 1000} if tails else set()
            assert {tail.chain_key for tail in got.tails} == wanted
            blocks = {o: address(b) for b in (*got.blocks, *got.tails) for o in b.offsets}
            assert {o: self.dram[o] for o in blocks} == blocks, "a leased slot holds another block"
            self.leases[got.lease_id] = (self.now + lease, owner, blocks)

    def use(self, ns: bytes, leaf: int) -> None:
        self.core.use(self.now, ns, path(leaf))

    def hint(self, ns: bytes, leaf: int, replicas: int) -> None:
        self.core.hint(self.now, ns, path(leaf), [replicas] * len(path(leaf)))

    def renew(self, pick: int, lease: int) -> None:
        if self.leases:
            lease_id = sorted(self.leases)[pick % len(self.leases)]
            until, owner, slots = self.leases[lease_id]
            alive = self.core.renew(self.now, lease_id, lease)
            assert alive == (self.now < until)
            if alive:
                self.leases[lease_id] = (self.now + lease, owner, slots)

    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        if self.leases:
            lease_id = sorted(self.leases)[pick % len(self.leases)]
            _, _, slots = self.leases.pop(lease_id)
            assert {offset: self.dram[offset] for offset in slots} == slots, "a leased slot was given to another"
            assert self.core.unpin(lease_id)

    def evict(self, ns: bytes, leaf: int) -> None:
        before = self.seen()
        assert self.core.evict(ns, path(leaf)) == len(before) - len(self.seen())

    def quarantine(self, ns: bytes, node: int) -> None:
        there = (ns, key(node)) in self.seen()
        assert self.core.quarantine(ns, [key(node)]) == there
        assert (ns, key(node)) not in self.seen()
        self.is_broken = True

    def flush(self, ns: bytes | None, dram_only: bool) -> None:
        def asked() -> list[Address]:
            return [a for a, where in self.seen().items() if ns in (None, a[0]) and (where[0] or not dram_only)]

        before = asked()
        removed, kept = self.core.flush(self.now, ns, dram_only=dram_only)
        assert removed == len(before) - len(asked())
        assert kept >= len(asked())

    @rule(ns=namespaces, leaf=leaves, tails=st.booleans())
    def load(self, ns: bytes, leaf: int, tails: bool) -> None:
        chain, before, protected = path(leaf), self.seen(), self.protected()
        run = next((i for i, k in enumerate(chain) if (ns, k) not in before), len(chain))
        loads = self.core.load(self.now, ns, chain, tails=tails)
        after = self.seen()
        assert all(after[ns, k] == before[ns, k] for k in chain[:run]), "a load took from its own run"
        assert all(before[address(each.block)] == (False, True) for each in loads)
        for each in loads:
            assert not protected & set(each.offsets)
            assert all(offset < self.core.resizing.usable_nbytes for offset in each.offsets)
            entry = self.extents[each.ssd_offset]
            assert entry is not None
            assert (entry.kv_namespace, entry.chain_key) == address(each.block)
            self.dram |= dict.fromkeys(each.offsets, each)
        self.loads += loads
        under_way = sum(address(each.block) in [(ns, k) for k in chain[:run]] for each in self.loads)
        assert self.core.num_loading(ns, chain[:run]) <= under_way

    @rule(pick=picks, outcome=st.sampled_from([LoadOutcome.OK, *LoadOutcome]))
    def loaded(self, pick: int, outcome: LoadOutcome) -> None:
        if self.loads:
            load = self.loads.pop(pick % len(self.loads))
            entry = self.extents[load.ssd_offset]
            assert entry is not None, "an extent was given to another while it was read"
            assert (entry.kv_namespace, entry.chain_key) == address(load.block)
            assert all(self.dram[offset] is load for offset in load.offsets)
            self.dram |= dict.fromkeys(load.offsets, address(load.block))
            removed = load.block.removed
            self.core.loaded(self.now, load, outcome)
            assert removed or load.block.offsets == (load.offsets if outcome is LoadOutcome.OK else ())
            self.is_broken = outcome is not LoadOutcome.OK

    @rule(ns=namespaces, leaf=leaves)
    def bring(self, ns: bytes, leaf: int) -> None:
        """To have more in DRAM that came from SSD."""
        before = len(self.loads)
        self.load(ns, leaf, tails=True)
        while len(self.loads) > before:
            self.loaded(before, LoadOutcome.OK)

    @rule(everything=st.booleans(), and_flush=st.booleans())
    def write_back(self, everything: bool, and_flush: bool) -> None:
        """To have more on SSD, and more only there."""
        self.freed_is_taken()
        before = len(self.writes)
        self.begin_writes(8, everything)
        while len(self.writes) > before:
            self.written(before, ok=True)
        if and_flush:
            self.flush(None, dram_only=True)

    @rule(max_blocks=st.integers(0, 4), everything=st.booleans())
    def begin_writes(self, max_blocks: int, everything: bool) -> None:
        before = self.seen()
        writes = self.core.writes(self.now, max_blocks * 4096, everything=everything)
        assert {a: where[0] for a, where in before.items() if where[0]}.keys() <= self.seen().keys()
        for write in writes:
            where = address(write.block)
            assert before[where] == (True, False)
            assert all(self.dram[offset] == where for offset in write.offsets)
            span = range(write.ssd_offset, write.ssd_offset + -(-write.block.spec.block_nbytes // 4096) * 4096, 4096)
            assert not any(page in self.extents for page in span), "an extent was given again before that was told"
            self.extents[write.ssd_offset] = None
            parent = write.block.prefix_node.parent
            assert parent is not None
            assert everything or parent.is_root or (parent.block is not None and parent.block.ssd is not None)
        self.writes += writes

    @rule(pick=picks, ok=st.booleans())
    def written(self, pick: int, ok: bool) -> None:
        if self.writes:
            write = self.writes.pop(pick % len(self.writes))
            ns, chain_key = where = address(write.block)
            assert all(self.dram[offset] == where for offset in write.offsets), "a slot changed while it was written"
            if ok:
                parent, tokens = self.parents[where], write.block.num_tokens
                self.extents[write.ssd_offset] = SsdBlock(
                    write.ssd_offset, ns, chain_key, parent, SPECS[ns], DIGESTS[ns], tokens
                )
            removed = write.block.removed
            self.core.written(self.now, write, ok)
            assert removed or write.block.ssd_offset == (write.ssd_offset if ok else None)

    @rule(units=st.integers(1, 24), may_lose=st.booleans())
    def resize(self, units: int, may_lose: bool) -> None:
        """Shrink or extend the arena, and vacate what is too high."""
        resizing, slabs = self.core.resizing, self.core.store.dram.slabs
        resizing.resize(units * slabs.unit_nbytes)
        protected = self.protected()
        while True:
            before = self.seen()
            step = resizing.vacate(self.now, 2 * SPEC.block_nbytes, may_lose=may_lose)
            left = {where for where in before if where not in self.seen()}
            assert may_lose or not left, "a block was lost"
            for move in step.moves:
                moved = {a: b for a, b in zip(move.before, move.after, strict=True) if a != b}
                assert not protected & {*moved, *moved.values()}
                assert all(self.dram[offset] == address(move.copy.block) for offset in move.before)
                assert all(offset < resizing.usable_nbytes for offset in moved.values())
                self.dram |= {b: self.dram[a] for a, b in moved.items()}
            resizing.moved(step.moves)
            policy_views.check_chains(before, self.seen(), self.parents)
            self.before = self.seen()
            assert self.core.validate() == []
            if not step.is_progress:
                break
        high = set(slabs.high_offsets())
        freed = {
            offset for span in resizing.take_vacated() for offset in range(span.start, span.stop, slabs.unit_nbytes)
        }
        assert not freed & {offset // slabs.unit_nbytes * slabs.unit_nbytes for offset in high}
        assert all(offset >= resizing.usable_nbytes for offset in freed)
        if may_lose and not self.protected() and not high <= protected:
            evictable = [b for b in self.core.store.index if self.core.store.may_remove(b)]
            assert not evictable, "blocks that could be evicted keep memory that was to be yielded"

    @rule()
    def freed_is_taken(self) -> None:
        for offset in self.core.take_ssd_freed():
            del self.extents[offset]

    def restart(self) -> None:
        """Check that all durable blocks that were not reported as given up come back."""
        entries = [entry for entry in self.extents.values() if entry is not None]
        twice = {(e.kv_namespace, e.chain_key): e for e in entries}
        entries = list(twice.values())
        self.extents = {entry.offset: entry for entry in entries}
        self.boot(entries)
        assert self.seen() == {(e.kv_namespace, e.chain_key): (False, True) for e in entries}

    @invariant()
    def nothing_is_wrong(self) -> None:
        assert self.core.validate() == []
        assert self.core.leases.keys() == self.leases.keys()
        assert {o for offsets in self.core.fenced.values() for o in offsets} == set().union(*self.unrevoked.values())
        assert set(self.core.staging.loads) == set(self.loads)
        assert set(self.core.staging.writes) == set(self.writes)

    @invariant()
    def no_chain_breaks(self) -> None:
        after = self.seen()
        if not self.is_broken:
            policy_views.check_chains(self.before, after, self.parents)
        self.before, self.is_broken = after, False

    @invariant()
    def events_tell_what_is_visible(self) -> None:
        self.told.check()

    @invariant()
    def totals_only_rise(self) -> None:
        totals = self.core.totals()
        assert all(totals[name] >= count for name, count in self.totals.items())
        self.totals = totals

    @invariant()
    def quotas_are_kept(self) -> None:
        for ns, share in QUOTA.items():
            assert policy_views.dram_nbytes(self.core, ns) <= share * self.limits.arena_nbytes

    def teardown(self) -> None:
        """At rest nothing is held; and when all is flushed, nothing is left."""
        if not hasattr(self, "core"):
            return
        for load in self.loads:
            self.core.loaded(self.now, load, LoadOutcome.IO_ERROR)
        for write in self.writes:
            self.core.written(self.now, write, False)
        for put_id in list(self.puts):
            self.core.abort(put_id)
            self.unrevoked[put_id] = set()
        for put_id in self.unrevoked:
            self.core.fence_revoked(put_id)
        self.core.expire(self.now + 10_000)
        policy_views.check_emptied(self.core, self.now, sorted(self.extents))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=120, stateful_step_count=50, deadline=None, derandomize=True)
