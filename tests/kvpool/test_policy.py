"""The pool node's decisions, one behaviour each. Time is a number the tests choose."""

import itertools

import numpy as np
import pytest

from kvpool import BlockRun, KvGroup, KvSpec, kv_namespace
from kvpool.errors import AddressError, PutLost, SpecError, SpecMismatch
from kvpool.policy import PoolCore, PoolLimits, PutRequest, SlotStatus
from moonpool_proto.v1 import pool_pb2

NEW, EXISTS, NO_SPACE = SlotStatus.NEW, SlotStatus.EXISTS, SlotStatus.NO_SPACE
ROOT = bytes(16)
S = 1_000_000_000


class Pool:
    """A core for the two-group spec with room for `room` blocks, and short hands for its calls."""

    def __init__(self, spec: KvSpec, room: int) -> None:
        self.spec, self.ns = spec, kv_namespace("w", spec)
        arena = sum(-(-spec.slot_nbytes(g) // 64) * 64 for g in range(2)) * room
        self.core = PoolCore(PoolLimits(arena, 64, operation_ns=30 * S, max_lease_ns=600 * S), incarnation=7)

    def put(
        self, chain: list[bytes], parent: bytes = ROOT, now: int = 0, ttl: int = 60
    ) -> tuple[str, list[SlotStatus]]:
        parents = [parent, *chain[:-1]]
        got = self.core.allocate(
            now * S, PutRequest(self.ns, self.spec, chain, parents), owner="w", owner_incarnation=1, ttl_ns=ttl * S
        )
        return got.put_id, list(got.status)

    def digests(self, n: int, fill: int = 1) -> list[tuple[bytes, ...]]:
        return [tuple(bytes([fill]) * 8 * self.spec.num_layers(g) for g in range(2)) for _ in range(n)]

    def store(self, chain: list[bytes], parent: bytes = ROOT, now: int = 0) -> list[SlotStatus]:
        put_id, status = self.put(chain, parent, now)
        if put_id:
            self.core.seal(now * S, put_id, self.digests(status.count(NEW)))
            self.core.fence_revoked(put_id)
        return status

    def pin(self, chain: list[bytes], now: int = 0, lease: int = 10):
        return self.core.pin(now * S, self.ns, chain, owner="w", owner_incarnation=1, lease_ns=lease * S)

    def held(self, chain: list[bytes]) -> int:
        return len(self.core.store.leading_run(self.ns, chain))


def keys(n: int, salt: int = 0) -> list[bytes]:
    return [bytes([salt]) + i.to_bytes(15, "big") for i in range(1, n + 1)]


@pytest.fixture
def pool(spec: KvSpec):
    pool = Pool(spec, room=4)
    yield pool
    assert pool.core.validate() == []


def test_statuses_are_the_wires() -> None:
    assert {s.name: s.value for s in SlotStatus} == {
        "NEW": pool_pb2.SLOT_NEW,
        "EXISTS": pool_pb2.SLOT_EXISTS,
        "NO_SPACE": pool_pb2.SLOT_NO_SPACE,
    }


def test_a_put_is_invisible_until_sealed(pool: Pool) -> None:
    chain = keys(3)
    put_id, status = pool.put(chain)
    assert status == [NEW] * 3
    assert pool.pin(chain) is None
    assert pool.core.log.seq == 0
    assert pool.core.seal(0, put_id, pool.digests(3)) == 3
    assert len(pool.pin(chain).blocks) == 3
    assert pool.core.log.after(7, 0)[0].stored == (BlockRun(pool.ns, b"".join(chain)),)


def test_blocks_sealed_or_being_written_exist_already(pool: Pool) -> None:
    chain = keys(4)
    pool.store(chain[:1])
    pool.put(chain[:2])
    assert pool.put(chain[:3])[1] == [EXISTS, EXISTS, NEW]
    assert pool.put(chain[:3]) == ("", [EXISTS] * 3)


def test_a_repeated_key_is_new_once(pool: Pool) -> None:
    key = keys(1)[0]
    assert pool.put([key, key])[1] == [NEW, EXISTS]


def test_after_no_space_nothing_is_new(pool: Pool) -> None:
    assert pool.put(keys(6))[1] == [NEW] * 4 + [NO_SPACE] * 2


def test_slots_of_both_groups_never_overlap(pool: Pool) -> None:
    pool.store(keys(4))
    blocks = pool.pin(keys(4)).blocks
    spans = sorted((o, o + pool.spec.slot_nbytes(g)) for b in blocks for g, o in enumerate(b.offsets))
    assert len(spans) == 8
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_sealed_put_cannot_be_sealed_or_aborted_again(pool: Pool) -> None:
    put_id, _ = pool.put(keys(1))
    pool.core.seal(0, put_id, pool.digests(1))
    with pytest.raises(PutLost, match="allocate again"):
        pool.core.seal(0, put_id, pool.digests(1))
    assert not pool.core.abort(put_id)


def test_a_put_past_its_ttl_cannot_be_sealed(pool: Pool) -> None:
    put_id, _ = pool.put(keys(1), ttl=5)
    with pytest.raises(PutLost):
        pool.core.seal(5 * S, put_id, pool.digests(1))


def test_an_expired_puts_slots_come_back_when_its_key_is_revoked(pool: Pool) -> None:
    put_id, _ = pool.put(keys(4), ttl=5)
    assert pool.core.expire(4 * S) == []
    assert pool.core.expire(5 * S) == [put_id]
    assert pool.put(keys(1, salt=1), now=5)[1] == [NO_SPACE]
    pool.core.fence_revoked(put_id)
    assert pool.put(keys(1, salt=1), now=6)[1] == [NEW]


def test_a_lost_owner_is_forgotten_and_nobody_else(pool: Pool) -> None:
    pool.store(keys(1))
    pool.pin(keys(1))
    put_id, _ = pool.put(keys(2, salt=1))
    other = pool.core.pin(0, pool.ns, keys(1), owner="w", owner_incarnation=2, lease_ns=10 * S)
    assert other is not None
    assert pool.core.forget_owner("w", 1) == [put_id]
    assert list(pool.core.leases) == [other.lease_id]
    assert pool.core.forget_owner("w", 1) == []


def test_an_aborted_puts_slots_come_back_when_its_key_is_revoked(pool: Pool) -> None:
    put_id, _ = pool.put(keys(4))
    assert pool.core.abort(put_id)
    assert pool.put(keys(1), now=1)[1] == [NO_SPACE]
    pool.core.fence_revoked(put_id)
    assert pool.put(keys(1), now=1)[1] == [NEW]


def test_a_partly_kept_put_shows_the_kept_blocks_and_fences_the_others(pool: Pool) -> None:
    put_id, _ = pool.put(keys(4))
    assert pool.core.seal(0, put_id, pool.digests(4), keep=[True, False, True, True]) == 3
    assert pool.held(keys(4)) == 1
    assert len(pool.core.fenced[put_id]) == 2
    pool.core.fence_revoked(put_id)
    assert pool.store([keys(2)[1]], parent=keys(1)[0]) == [NEW]
    assert pool.held(keys(4)) == 4


def test_pin_takes_the_longest_leading_run(pool: Pool) -> None:
    chain = keys(4)
    pool.store(chain[:2])
    pool.store(chain[3:], parent=chain[2])
    assert [b.chain_key for b in pool.pin(chain).blocks] == chain[:2]
    assert pool.pin(keys(2, salt=9)) is None


def test_digests_come_back_as_sealed(pool: Pool) -> None:
    put_id, _ = pool.put(keys(2))
    pool.core.seal(0, put_id, [*pool.digests(1, fill=3), *pool.digests(1, fill=4)])
    assert [b.digests[1][0] for b in pool.pin(keys(2)).blocks] == [3, 4]


def test_the_least_recently_used_leaf_goes_first(pool: Pool) -> None:
    a, b = keys(2, salt=1), keys(2, salt=2)
    pool.store(a)
    pool.store(b)
    pool.core.unpin(pool.pin(a).lease_id)
    assert pool.store(keys(1, salt=3)) == [NEW]
    assert (pool.held(a), pool.held(b)) == (2, 1)
    assert pool.store(keys(1, salt=4)) == [NEW]
    assert (pool.held(a), pool.held(b)) == (2, 0)
    assert pool.store(keys(1, salt=5)) == [NEW]
    assert pool.held(a) == 1


def test_asking_to_store_a_block_again_is_a_use_of_it(pool: Pool) -> None:
    for salt in range(4):
        pool.store(keys(1, salt=salt))
    assert pool.store(keys(1, salt=0)) == [EXISTS]
    pool.store(keys(1, salt=5))
    assert [pool.held(keys(1, salt=s)) for s in range(4)] == [1, 0, 1, 1]


def test_a_put_never_evicts_its_own_prefix(pool: Pool) -> None:
    chain = keys(6)
    pool.store(chain[:4])
    assert pool.put(chain)[1] == [EXISTS] * 4 + [NO_SPACE] * 2
    assert pool.held(chain) == 4


def test_leased_blocks_are_not_evicted_and_their_parents_neither(pool: Pool) -> None:
    chain = keys(4)
    pool.store(chain)
    lease = pool.pin(chain)
    assert pool.store(keys(1, salt=1)) == [NO_SPACE]
    assert pool.core.evict(pool.ns, chain) == 0
    pool.core.unpin(lease.lease_id)
    assert pool.store(keys(1, salt=1)) == [NEW]
    assert pool.held(chain) == 3


def test_an_expired_lease_protects_until_the_longest_operation_is_over(pool: Pool) -> None:
    pool.store(keys(4))
    lease = pool.pin(keys(4), lease=10)
    pool.core.expire(39 * S)
    assert pool.store(keys(1, salt=1), now=39) == [NO_SPACE]
    assert not pool.core.renew(10 * S, lease.lease_id, S)
    pool.core.expire(40 * S)
    assert pool.store(keys(1, salt=1), now=40) == [NEW]
    assert not pool.core.unpin(lease.lease_id)


def test_a_renewed_lease_lasts_from_the_renewal(pool: Pool) -> None:
    pool.store(keys(4))
    lease = pool.pin(keys(4), lease=10)
    assert pool.core.renew(9 * S, lease.lease_id, 10 * S)
    pool.core.expire(48 * S)
    assert pool.store(keys(1, salt=1), now=48) == [NO_SPACE]
    assert pool.core.renew(18 * S, lease.lease_id, 10 * S)
    assert not pool.core.renew(28 * S, lease.lease_id, 10 * S)


def test_leases_and_puts_are_cut_to_the_longest_allowed(pool: Pool) -> None:
    put_id, _ = pool.put(keys(1), ttl=10**6)
    assert pool.core.expire(600 * S) == [put_id]
    pool.store(keys(1, salt=1))
    pool.pin(keys(1, salt=1), lease=10**6)
    pool.core.expire(630 * S)
    assert not pool.core.leases


def test_quarantine_hides_a_leased_block_at_once_and_keeps_its_slot(pool: Pool) -> None:
    chain = keys(4)
    pool.store(chain)
    lease = pool.pin(chain)
    assert pool.core.quarantine(pool.ns, [chain[1]]) == 1
    assert pool.held(chain) == 1
    assert pool.put([chain[1]], parent=chain[0])[1] == [NO_SPACE]
    assert pool.core.validate() == []
    pool.core.unpin(lease.lease_id)
    assert pool.store([chain[1]], parent=chain[0]) == [NEW]
    assert pool.held(chain) == 4


def test_evict_takes_the_tail_of_a_chain_but_no_parent_of_a_block_that_stays(pool: Pool) -> None:
    chain = keys(4)
    pool.store(chain)
    assert pool.core.evict(pool.ns, chain[1:2]) == 0
    assert pool.core.evict(pool.ns, chain[2:]) == 2
    assert pool.held(chain) == 2


def test_a_namespace_keeps_one_spec_while_it_has_blocks(pool: Pool, spec: KvSpec) -> None:
    pool.store(keys(1))
    other = KvSpec(spec.groups[:1], spec.block_tokens)
    args = {"owner": "w", "owner_incarnation": 1, "ttl_ns": S}
    with pytest.raises(SpecMismatch):
        pool.core.allocate(0, PutRequest(pool.ns, other, keys(2), [ROOT] * 2), **args)
    pool.core.evict(pool.ns, keys(1))
    assert pool.core.allocate(0, PutRequest(pool.ns, other, keys(1), [ROOT]), **args).status == (NEW,)


def test_requests_that_cannot_be_right_are_refused(pool: Pool) -> None:
    args = {"owner": "w", "owner_incarnation": 1, "ttl_ns": S}
    huge = KvSpec((KvGroup("full", 0, (0,), 64, 128, "float32"),), 16)
    with pytest.raises(SpecError, match="too small"):
        pool.core.allocate(0, PutRequest(b"h" * 16, huge, keys(1), [ROOT]), **args)
    with pytest.raises(AddressError, match="parents"):
        pool.core.allocate(0, PutRequest(pool.ns, pool.spec, keys(2), [ROOT]), **args)
    put_id, _ = pool.put(keys(2))
    with pytest.raises(SpecError, match="got digests for"):
        pool.core.seal(0, put_id, pool.digests(1))
    with pytest.raises(SpecError, match="digests per group"):
        pool.core.seal(0, put_id, [(b"", b"")] * 2)
    assert pool.core.seal(0, put_id, pool.digests(2)) == 2


def test_sizes_share_the_arena_and_slabs_change_hands() -> None:
    small = KvSpec((KvGroup("full", 0, (0,), 1, 8, "float32"),), 2)
    large = KvSpec((KvGroup("full", 0, (0,), 8, 64, "float32"),), 16)
    core = PoolCore(PoolLimits(1 << 20, 64 << 10, S, S), incarnation=1)
    args = {"owner": "w", "owner_incarnation": 1, "ttl_ns": S}
    rng = np.random.default_rng(0)
    for spec, n in ((small, 20_000), (large, 64), (small, 3000), (large, 16)):
        chain = [rng.bytes(16) for _ in range(n)]
        got = core.allocate(0, PutRequest(kv_namespace("w", spec), spec, chain, [ROOT] * n), **args)
        digests = [(bytes(8),)] * len(got.new_blocks)
        assert core.seal(0, got.put_id, digests) == len(got.new_blocks) > 0
        if spec is large:
            assert len(got.new_blocks) >= 14
        assert core.validate() == []


class Models:
    """A core with blocks of two models that have one tokenizer: equal chains, other slots. Blocks are put whole."""

    SMALL = KvSpec((KvGroup("full", 0, (0, 1), 2, 16, "float32"),), 8)
    LARGE = KvSpec((KvGroup("full", 0, (0, 1, 2), 8, 32, "float32"),), 8)

    def __init__(self, arena_nbytes: int) -> None:
        self.core = PoolCore(PoolLimits(arena_nbytes, 16 << 10, S, S), incarnation=1)

    def store(self, spec: KvSpec, chain: list[bytes]) -> list[SlotStatus]:
        parents = [ROOT, *chain[:-1]]
        ns = kv_namespace("w", spec)
        got = self.core.allocate(0, PutRequest(ns, spec, chain, parents), owner="w", owner_incarnation=1, ttl_ns=S)
        if got.put_id:
            self.core.seal(0, got.put_id, [(bytes(8 * spec.num_layers(0)),)] * len(got.new_blocks))
            self.core.fence_revoked(got.put_id)
        assert self.core.validate() == []
        return list(got.status)

    def held(self, spec: KvSpec, chain: list[bytes]) -> int:
        return len(self.core.store.leading_run(kv_namespace("w", spec), chain))


def test_equal_chains_of_two_models_are_different_blocks() -> None:
    models = Models(1 << 20)
    chain = keys(4)
    assert models.store(Models.SMALL, chain) == [NEW] * 4
    assert models.held(Models.LARGE, chain) == 0
    assert models.store(Models.LARGE, chain[:2]) == [NEW] * 2
    assert (models.held(Models.SMALL, chain), models.held(Models.LARGE, chain)) == (4, 2)
    models.core.quarantine(kv_namespace("w", Models.LARGE), chain)
    assert (models.held(Models.SMALL, chain), models.held(Models.LARGE, chain)) == (4, 0)


@pytest.mark.parametrize("first", [Models.SMALL, Models.LARGE])
def test_a_model_takes_the_room_of_the_others_least_recently_used_blocks(first: KvSpec) -> None:
    models = Models(1 << 20)
    second = Models.LARGE if first is Models.SMALL else Models.SMALL
    chains = [keys(4, salt) for salt in range(120)]
    for chain in chains:
        models.store(first, chain)
    kept = sum(models.held(first, chain) for chain in chains)
    assert models.core.counters["evicted_blocks"] == 480 - kept > 0, "the arena is full of the first model"
    fresh = chains[-1]
    for chain in (keys(4, 200), keys(4, 201), fresh):
        assert models.store(second, chain) == [NEW] * 4
        assert models.held(second, chain) == 4
    assert models.held(first, fresh) == 4, "what was used last is still there"
    assert 0 < sum(models.held(first, chain) for chain in chains) < kept


def test_a_leased_prefix_of_one_model_survives_a_flood_of_another() -> None:
    models = Models(1 << 20)
    chain = keys(5, 1)
    models.store(Models.SMALL, chain)
    grant = models.core.pin(0, kv_namespace("w", Models.SMALL), chain, owner="r", owner_incarnation=1, lease_ns=S)
    assert grant is not None
    for salt in range(2, 60):
        assert NO_SPACE not in models.store(Models.LARGE, keys(4, salt))
    assert models.held(Models.SMALL, chain) == 5
    models.core.unpin(grant.lease_id)
    for salt in range(60, 120):
        models.store(Models.LARGE, keys(4, salt))
    assert models.held(Models.SMALL, chain) == 0


def test_two_models_used_in_turns_both_stay() -> None:
    models = Models(1 << 20)
    hot = keys(6, 200)
    for salt in range(100):
        models.store(Models.SMALL, hot)
        models.store(Models.LARGE, hot[:3])
        models.store(Models.SMALL if salt % 2 else Models.LARGE, keys(4, salt))
    assert (models.held(Models.SMALL, hot), models.held(Models.LARGE, hot)) == (6, 3)


@pytest.mark.parametrize("policy", ["lru", "moonpool"])
@pytest.mark.parametrize(
    ("blocks", "window_blocks", "window_layers", "arena_blocks", "slab_nbytes", "least", "broken"),
    [(40, 4, 3, 600, 16 << 10, 9, 2), (116, 64, 6, 10_913, 348_160, 17, 3)],  # there is room for 11 and 21 prefixes
)
def test_prefixes_and_their_windows_leave_a_full_pool_together_and_in_turn(
    policy: str,
    blocks: int,
    window_blocks: int,
    window_layers: int,
    arena_blocks: int,
    slab_nbytes: int,
    least: int,
    broken: int,
) -> None:
    lasting = KvSpec((KvGroup("full", 0, (0,), 1, 16, "float32"),), 16)
    windowed = KvSpec((KvGroup("window", 64, tuple(range(1, 1 + window_layers)), 1, 16, "float32"),), 16)
    core = PoolCore(
        PoolLimits(
            arena_blocks * lasting.block_nbytes, slab_nbytes, operation_ns=30 * S, max_lease_ns=600 * S, policy=policy
        ),
        incarnation=1,
    )
    names = kv_namespace("w", lasting), kv_namespace("w", windowed)

    def store(now: int, spec: KvSpec, name: bytes, chain: list[bytes], parents: list[bytes]) -> None:
        put = PutRequest(name, spec, chain, parents, compute_s=0.01 * len(chain))
        got = core.allocate(now * S, put, owner="w", owner_incarnation=1, ttl_ns=60 * S)
        digests = [(bytes(8 * spec.num_layers(0)),)] * len(got.new_blocks)
        core.seal(now * S, got.put_id, digests)
        core.fence_revoked(got.put_id)

    chains = [keys(blocks, salt) for salt in range(60)]
    for now, chain in enumerate(chains):
        parents = [ROOT, *chain[:-1]]
        for first in range(0, blocks, blocks // 8):  # as a prompt is stored, chunk by chunk
            chunk = slice(first, first + blocks // 8)
            store(now, lasting, names[0], chain[chunk], parents[chunk])
        for half in (chain[-window_blocks : -window_blocks // 2], chain[-window_blocks // 2 :]):
            store(now, windowed, names[1], half, [ROOT] * len(half))
        held = [len(core.store.leading_run(names[0], chain)) for chain in chains]
        seen = [sum(core.store.find(names[1], key) is not None for key in chain[-window_blocks:]) for chain in chains]
        whole = [a == blocks and b == window_blocks for a, b in zip(held, seen, strict=True)][: now + 1]
        assert sum(whole) >= min(now + 1, least)
        assert whole[-sum(whole) :] == [True] * sum(whole)
        assert sum(a > 0 or b > 0 for a, b in zip(held, seen, strict=True)) <= sum(whole) + broken
    assert core.validate() == []
