"""Any sequence of calls against a model: what is visible, protected, told in events, and the self-check."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpool import Directory, KvGroup, KvSpec, keys_from_bytes, keys_u64
from kvpool.errors import PutLost
from kvpool.policy import PoolCore, PoolLimits, SlotStatus

SPEC = KvSpec((KvGroup("full", 0, (0,), 1, 4, "float32"), KvGroup("window", 4, (1, 2), 1, 4, "float16")), 2)
# Of another model: slots of another size, which take two adjoining units of the arena.
WIDE = KvSpec((KvGroup("full", 0, (0, 1), 1, 4, "float32"),), 2)
SPECS = {b"a" * 16: SPEC, b"b" * 16: SPEC, b"c" * 16: WIDE}
NAMESPACES = sorted(SPECS)
DIGESTS = {ns: tuple(bytes(8 * spec.num_layers(g)) for g in range(spec.num_groups)) for ns, spec in SPECS.items()}
OPERATION_NS = 20


def path(leaf: int) -> list[bytes]:
    """The chain from the root to a node of a binary tree: prompts that share prefixes."""
    nodes = []
    while leaf:
        nodes.append(leaf)
        leaf //= 2
    return [node.to_bytes(16, "little") for node in reversed(nodes)]


class PoolMachine(RuleBasedStateMachine):
    leaves = st.integers(1, 31)
    namespaces = st.sampled_from(NAMESPACES)
    spans = st.integers(0, 30)
    picks = st.integers(0, 5)

    @initialize(room=st.integers(2, 9))
    def start(self, room: int) -> None:
        self.now = 0
        self.core = PoolCore(PoolLimits(room * 128, 64, OPERATION_NS, 1000), incarnation=1)
        self.directory = Directory()
        for message in self.core.store.snapshot():
            self.directory.apply("p", message)
        self.seq = 0
        self.visible: dict[tuple[bytes, bytes], bytes] = {}  # address -> parent
        self.puts: dict[str, tuple[int, list[tuple[bytes, bytes, bytes]]]] = {}
        self.leases: dict[str, tuple[int, set[tuple[bytes, bytes]], set[int]]] = {}
        self.unrevoked: dict[str, set[int]] = {}  # ended put -> slots that its writer may still write

    def protected(self) -> set[int]:
        slots: set[int] = set()
        for until, _, offsets in self.leases.values():
            slots |= offsets if self.now < until + OPERATION_NS else set()
        for offsets in self.unrevoked.values():
            slots |= offsets
        return slots

    @rule(ns=namespaces, leaf=leaves, ttl=spans)
    def allocate(self, ns: bytes, leaf: int, ttl: int) -> None:
        chain = path(leaf)
        parents = [bytes(16), *chain[:-1]]
        leased = {address for until, addresses, _ in self.leases.values() if self.now < until for address in addresses}
        protected = self.protected()
        got = self.core.allocate(self.now, ns, SPECS[ns], chain, parents, owner="w", owner_incarnation=1, ttl_ns=ttl)
        remaining = {(b.kv_namespace, b.chain_key) for b in self.core.store.index if b.sealed}
        evicted = self.visible.keys() - remaining
        assert remaining <= self.visible.keys()
        assert not evicted & leased
        assert not any(
            (ns_, parent) in evicted for (ns_, key), parent in self.visible.items() if (ns_, key) in remaining
        )
        for address in evicted:
            del self.visible[address]
        new = [i for i, status in enumerate(got.status) if status is SlotStatus.NEW]
        assert [b.chain_key for b in got.new_blocks] == [chain[i] for i in new]
        assert not protected & {offset for b in got.new_blocks for offset in b.offsets}
        assert all((ns, chain[i]) not in self.visible for i in new)
        assert all(got.status[i] is SlotStatus.EXISTS for i, key in enumerate(chain) if (ns, key) in self.visible)
        if got.put_id:
            self.puts[got.put_id] = (self.now + ttl, [(ns, chain[i], parents[i]) for i in new])

    @rule(ns=namespaces, leaf=leaves)
    def store(self, ns: bytes, leaf: int) -> None:
        before = set(self.puts)
        self.allocate(ns, leaf, ttl=1)
        for put_id in self.puts.keys() - before:
            self.seal(sorted(self.puts).index(put_id), kept=-1)

    @rule(pick=picks, kept=st.integers(0, 2**6 - 1))
    def seal(self, pick: int, kept: int) -> None:
        if not self.puts:
            return
        put_id = sorted(self.puts)[pick % len(self.puts)]
        until, blocks = self.puts.pop(put_id)
        keep = [bool(kept >> i & 1) for i in range(len(blocks))]
        offsets = self.offsets_of(put_id)
        if until <= self.now:
            self.puts[put_id] = (until, blocks)
            try:
                self.core.seal(self.now, put_id, [DIGESTS[ns] for ns, _, _ in blocks], keep)
            except PutLost:
                return
            raise AssertionError("an expired put was sealed")
        assert self.core.seal(self.now, put_id, [DIGESTS[ns] for ns, _, _ in blocks], keep) == sum(keep)
        for (ns, key, parent), keep_block in zip(blocks, keep, strict=True):
            if keep_block:
                self.visible[ns, key] = parent
        dropped = {o for slots, keep_block in zip(offsets, keep, strict=True) if not keep_block for o in slots}
        self.unrevoked[put_id] = dropped

    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        if not self.puts:
            return
        put_id = sorted(self.puts)[pick % len(self.puts)]
        offsets = self.offsets_of(put_id)
        del self.puts[put_id]
        assert self.core.abort(put_id)
        self.unrevoked[put_id] = {o for slots in offsets for o in slots}

    @rule(pick=picks)
    def revoke(self, pick: int) -> None:
        if not self.unrevoked:
            return
        put_id = sorted(self.unrevoked)[pick % len(self.unrevoked)]
        self.core.fence_revoked(put_id)
        del self.unrevoked[put_id]

    @rule(step=st.integers(0, 15))
    def time_passes(self, step: int) -> None:
        self.now += step
        due = {put_id for put_id, (until, _) in self.puts.items() if until <= self.now}
        offsets = {put_id: {o for slots in self.offsets_of(put_id) for o in slots} for put_id in due}
        assert set(self.core.expire(self.now)) == due
        for put_id in due:
            del self.puts[put_id]
            self.unrevoked[put_id] = offsets[put_id]
        self.leases = {i: lease for i, lease in self.leases.items() if self.now < lease[0] + OPERATION_NS}

    @rule(ns=namespaces, leaf=leaves, lease=spans)
    def pin(self, ns: bytes, leaf: int, lease: int) -> None:
        chain = path(leaf)
        depth = next((i for i, key in enumerate(chain) if (ns, key) not in self.visible), len(chain))
        got = self.core.pin(self.now, ns, chain, owner="w", owner_incarnation=1, lease_ns=lease)
        assert [b.chain_key for b in got.blocks] == chain[:depth] if got else depth == 0
        if got:
            slots = {offset for b in got.blocks for offset in b.offsets}
            self.leases[got.lease_id] = (self.now + lease, {(ns, key) for key in chain[:depth]}, slots)

    @rule(pick=picks, lease=spans)
    def renew(self, pick: int, lease: int) -> None:
        if not self.leases:
            return
        lease_id = sorted(self.leases)[pick % len(self.leases)]
        until, addresses, slots = self.leases[lease_id]
        alive = self.core.renew(self.now, lease_id, lease)
        assert alive == (self.now < until)
        if alive:
            self.leases[lease_id] = (self.now + lease, addresses, slots)

    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        if not self.leases:
            return
        lease_id = sorted(self.leases)[pick % len(self.leases)]
        del self.leases[lease_id]
        assert self.core.unpin(lease_id)

    @rule(ns=namespaces, leaf=leaves)
    def evict(self, ns: bytes, leaf: int) -> None:
        before = len(self.visible)
        self.core.evict(ns, path(leaf))
        remaining = {(b.kv_namespace, b.chain_key) for b in self.core.store.index if b.sealed}
        self.visible = {address: parent for address, parent in self.visible.items() if address in remaining}
        assert before - len(self.visible) <= len(path(leaf))

    @rule(ns=namespaces, node=leaves)
    def quarantine(self, ns: bytes, node: int) -> None:
        key = node.to_bytes(16, "little")
        assert self.core.quarantine(ns, [key]) == ((ns, key) in self.visible)
        self.visible.pop((ns, key), None)

    def offsets_of(self, put_id: str) -> list[tuple[int, ...]]:
        return [block.offsets for block in self.core.puts[put_id].blocks]

    @invariant()
    def nothing_is_wrong(self) -> None:
        if not hasattr(self, "core"):
            return
        assert self.core.validate() == []
        assert {(b.kv_namespace, b.chain_key) for b in self.core.store.index if b.sealed} == self.visible.keys()

    @invariant()
    def what_others_may_touch_is_kept(self) -> None:
        if not hasattr(self, "core"):
            return
        assert self.core.leases.keys() == self.leases.keys()
        fenced = {offset for offsets in self.core.fenced.values() for offset in offsets}
        assert fenced == {offset for offsets in self.unrevoked.values() for offset in offsets}

    @invariant()
    def events_tell_what_is_visible(self) -> None:
        if not hasattr(self, "core"):
            return
        for message in self.core.log.after(1, self.seq) or []:
            assert self.directory.apply("p", message)
            self.seq = message.seq
        assert self.directory.num_blocks("p") == len(self.visible)

    def teardown(self) -> None:
        """At rest nothing is held: every slot belongs to a visible block."""
        if not hasattr(self, "core"):
            return
        assert all(self.directory.match(ns, keys_u64(keys_from_bytes(key))) for ns, key in self.visible)
        for put_id in list(self.puts):
            self.core.abort(put_id)
            self.unrevoked[put_id] = set()
        for put_id in self.unrevoked:
            self.core.fence_revoked(put_id)
        self.core.expire(self.now + 10_000)
        assert (self.core.puts, self.core.leases, self.core.fenced) == ({}, {}, {})
        assert self.core.store.dram.slabs.num_slots_used == sum(SPECS[ns].num_groups for ns, _ in self.visible)
        assert self.core.validate() == []


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None, derandomize=True)
