"""Space of one tier: the slots of its copies, and the choice of the copies to evict. No chains, no clock.

Copies that can use each other's slots form a partition with its own eviction policy: those with the same list of slot
sizes, except that a namespace with a quota has a partition to itself. Within a partition, the policy chooses the
victim. Between partitions, the one whose next victim was used longest ago loses a copy.

Freed slots of one size are of no use to another size; only a whole free slab is. Evicting the copies of one size in the
policy's order frees slots scattered over many slabs, and a few copies in frequent use would keep every slab from
another model indefinitely. Therefore slabs are cleared whole, with all copies in them and all that follow those copies
(`plan_clearing`): among the slabs around the next victims, those whose copies have the oldest mean last use. In a tier
that keeps to recency, the newest last use counts instead: a prefix that loses one block of its window is lost whole.

`NamespaceTable` holds what the blocks of a namespace share: spec, slot sizes, partitions and quota.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvpool.errors import SpecError, SpecMismatch
from kvpool.policy.eviction import Resident, RetainingPolicy, RetainRequest, Retention, Use, make_policy
from kvpool.policy.records import DRAM, SSD, Block, BlockCopy, NamespaceState, Partition, is_evictable
from kvpool.policy.slabs import SlabAllocator
from kvpool.spec import KvSpec

_MAX_COPIES = 4096  # most copies cleared for one block


@dataclass(frozen=True)
class SlabClearing:
    """Copies to evict, in this order (followers first), and the slabs to create afterwards."""

    copies: list[BlockCopy]
    last_use: float  # of these, as `LastUse`
    slabs: list[tuple[int, int]]  # size of a slot, first unit


LastUse = Callable[[Collection[BlockCopy]], float]
"""What counts as the last use of several copies."""


def plan_clearing(
    tier: int,
    slabs: SlabAllocator,
    holders: Mapping[int, BlockCopy],
    freed: Mapping[int, int],
    sizes: Sequence[int],
    victims: Sequence[BlockCopy],
    last_use: LastUse,
) -> SlabClearing | None:
    """Return the evictions that make room for a slot of each of the sizes; None if impossible.

    `holders` maps offsets of slots to copies; `freed` slots count as free. The slabs that overlap those of `victims`
    are considered.
    """
    # Free slots are allocated while the rest is planned, so that none is planned twice.
    free, missing = _take_free(slabs, sizes)
    try:
        return _plan(tier, slabs, holders, freed, missing, victims, last_use)
    finally:
        for offset in free:
            slabs.free(offset)


def _take_free(slabs: SlabAllocator, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Allocate free slots. Returns (their offsets, sizes without a free slot, one entry per slab needed)."""
    offsets: list[int] = []
    missing: list[int] = []
    to_come: Counter[int] = Counter()
    for size in sizes:
        offset = None if to_come[size] else slabs.try_allocate(size)
        if offset is not None:
            offsets.append(offset)
            continue
        if not to_come[size]:
            missing.append(size)
            to_come[size] = slabs.slots_per_slab(size)
        to_come[size] -= 1
    return offsets, missing


def _plan(
    tier: int,
    slabs: SlabAllocator,
    holders: Mapping[int, BlockCopy],
    freed: Mapping[int, int],
    sizes: Sequence[int],
    victims: Sequence[BlockCopy],
    last_use: LastUse,
) -> SlabClearing | None:
    chosen: dict[BlockCopy, None] = {}
    taken: set[int] = set()  # units of the slabs to come
    made: list[tuple[int, int]] = []
    for size in sizes:
        windows = {
            window.start: window
            for victim in victims
            for offset in victim.offsets
            for window in slabs.windows(size, offset)
            if taken.isdisjoint(window)
        }
        plans = []
        for window in windows.values():
            copies = _with_followers(tier, slabs.used_offsets(window), holders, freed)
            if copies is not None:
                plans.append((last_use(copies), window.start, copies))
        if not plans:
            return None
        _, start, best = min(plans, key=lambda plan: plan[:2])
        chosen |= best
        taken |= set(windows[start])
        made.append((size, start))
    return SlabClearing(list(chosen), last_use(chosen), made)


def _with_followers(
    tier: int, offsets: Iterable[int], holders: Mapping[int, BlockCopy], freed: Mapping[int, int]
) -> dict[BlockCopy, None] | None:
    """Return the copies in these slots and all that follow them in the tier, followers first.

    Returns None if one of them cannot be evicted.
    """
    order: dict[BlockCopy, None] = {}
    for offset in offsets:
        if offset in freed:
            continue
        start = holders.get(offset)
        if start is None:
            return None
        stack = [(start, False)]
        while stack:
            copy, is_left = stack.pop()
            if is_left:
                order[copy] = None
            elif copy not in order:
                followers = _followers(tier, copy)
                if followers is None or len(order) + len(stack) > _MAX_COPIES:
                    return None
                stack.append((copy, True))
                stack += [(each, False) for each in followers]
    return order


def _followers(tier: int, copy: BlockCopy) -> list[BlockCopy] | None:
    """Return the copies of the tier that follow; None if `copy` could not be evicted even after them."""
    if not copy.ready or copy.holds or copy.gone:
        return None
    block = copy.block
    found = [each for child in block.prefix_node.children() if child.block and (each := _copy_in(child.block, tier))]
    if len(found) != block.prefix_node.following(tier):
        return None  # one is in transit
    is_last = copy.other is None
    stays = len(found) != block.prefix_node.num_following or any(each.other for each in found)
    return None if is_last and stays else found


def _copy_in(block: Block, tier: int) -> BlockCopy | None:
    return block.dram if tier == DRAM else block.ssd


def _mean_last_use(copies: Collection[BlockCopy]) -> float:
    return sum(copy.last_use for copy in copies) / len(copies) if copies else 0.0


def _newest_last_use(copies: Collection[BlockCopy]) -> float:
    return max((copy.last_use for copy in copies), default=0.0)


_BETWEEN_CLEARINGS = 16  # evictions after which slabs of other sizes are considered again if none was worth it
_NUM_LOOKED_AT = 8  # next victims of another size whose slabs are considered for clearing

GiveUp = Callable[[BlockCopy, str, int], None]  # copy, reason, now_ns


class TierSpace:
    """Slots of one tier, allocated for a whole copy at once or not at all.

    `give_up` is called for each evicted copy and must call `free` before it returns. SSD contents are durable, so a
    freed slot of that tier is withheld until `take_freed` has returned it. A block that is also in DRAM is not evicted
    from SSD for a block that DRAM evicts later, since it would soon have to be written again (`spare_until`).
    """

    def __init__(
        self, tier: int, slabs: SlabAllocator, policy: str, retained_shares: tuple[float, float], give_up: GiveUp
    ) -> None:
        """`retained_shares`: of the tier, that all tenants and one tenant may retain."""
        self.slabs = slabs
        self.holders: dict[int, BlockCopy] = {}  # by offset
        self.freed: dict[int, int] = {}  # withheld slots: offset -> bytes
        self.freed_nbytes = 0
        self.num_copies = 0  # complete ones
        self._recipient: BlockCopy | None = None  # gets the slots of the victim directly, if the sizes are equal
        self._refused: list[int] = []
        self._tier = tier
        self._policy = policy
        self._give_up = give_up
        self.retention = Retention(slabs.num_units * slabs.unit_nbytes, *retained_shares)
        self._partitions: dict[tuple[bytes, tuple[int, ...]], Partition] = {}
        self._keeps_to_recency = False
        self._until_clearing: Counter[tuple[int, ...]] = Counter()  # by sizes: evictions, see `_BETWEEN_CLEARINGS`
        self._num_uses = 0
        self._now_ns = 0  # of the last use
        # SSD only: blocks whose DRAM copy's last use is not later than this are not evicted.
        self.spare_until = math.inf
        self._may_take = _may_take_from_ssd(self) if tier == SSD else _may_take

    def partition(self, owner: bytes, sizes: tuple[int, ...]) -> Partition:
        """Return the partition of copies with these slot sizes, created if missing, and count one more namespace.

        `owner` is a namespace with a quota, or empty.
        """
        known = self._partitions.get((owner, sizes))
        if known is None:
            capacity_nbytes = max(1, self.slabs.num_units * self.slabs.unit_nbytes)
            retaining = RetainingPolicy(make_policy(self._policy, capacity_nbytes), self.retention)
            if self._keeps_to_recency:
                retaining.keep_to_recency()
            known = Partition(owner, sizes, retaining)
            self._partitions[owner, sizes] = known
        known.num_namespaces += 1
        return known

    def keep_to_recency(self) -> None:
        """Let all policies evict the least recently used blocks. Idempotent.

        Of models with windows, a prefix needs blocks of two namespaces. A policy that judges each block by its own uses
        keeps one without the other; by recency, they leave together.
        """
        if not self._keeps_to_recency:
            self._keeps_to_recency = True
            for partition in self._partitions.values():
                partition.policy.keep_to_recency()

    def forget(self, partition: Partition) -> None:
        """Remove a namespace from the partition, and the partition with its last namespace."""
        partition.num_namespaces -= 1
        if not partition.num_namespaces:
            del self._partitions[partition.owner, partition.sizes]

    def try_take(self, copy: BlockCopy) -> bool:
        """Allocate free slots for the copy without evicting. Returns False if there are not enough."""
        offsets = self.try_slots(copy.block.namespace)
        if offsets is None:
            return False
        self.assign(copy, offsets)
        return True

    def try_slots(self, namespace: NamespaceState) -> tuple[int, ...] | None:
        """Allocate free slots for a copy, which must then be assigned to one; None if there are not enough."""
        sizes, allocate = namespace.sizes[self._tier], self.slabs.try_allocate
        if len(sizes) == 1:
            offset = allocate(sizes[0])
            return None if offset is None else (offset,)
        offsets: list[int] = []
        for size in sizes:
            offset = allocate(size)
            if offset is None:
                self.free_slots(offsets)
                return None
            offsets.append(offset)
        return tuple(offsets)

    def take(self, copy: BlockCopy, use: Use, reason: str, *, choosy: bool) -> bool:
        """Allocate slots for the copy, evicting others as needed. Returns False, and evicts nothing, if impossible.

        With `choosy`, the policy also decides whether the copy is worth an eviction.
        """
        namespace = copy.block.namespace
        policy = namespace.partitions[self._tier].policy
        quota_nbytes = namespace.quotas_nbytes[self._tier]
        if quota_nbytes is not None and namespace.used_nbytes[self._tier] + copy.nbytes > quota_nbytes:
            if copy.nbytes > quota_nbytes or (choosy and not policy.admits(copy, use)):
                return False
            choosy = False
            if not self._evict_one(namespace.partitions[self._tier], "quota", use.now_ns, copy):
                return False
        while not copy.offsets and not self.try_take(copy):
            if choosy and not policy.admits(copy, use):
                return False
            choosy = False
            if not self.evict_for(namespace, reason, use.now_ns, copy):
                return False
        return True

    def try_take_low(self, copy: BlockCopy) -> tuple[int, ...] | None:
        """Allocate a low slot for each high slot of the copy. Returns the copy's offsets to come; None if impossible.

        The copy must not be evicted until `move` is called with them.
        """
        offsets: list[int] = []
        taken: list[int] = []
        for offset, size in zip(copy.offsets, copy.block.namespace.sizes[self._tier], strict=True):
            if self.slabs.is_high(offset):
                low = self.slabs.try_allocate(size)
                if low is None:
                    self.free_slots(taken)
                    return None
                taken.append(low)
                offset = low
            offsets.append(offset)
        return tuple(offsets)

    def move(self, copy: BlockCopy, offsets: tuple[int, ...]) -> None:
        """Replace the copy's slots by those that `try_take_low` returned, which have its bytes by now."""
        for before, offset in zip(copy.offsets, offsets, strict=True):
            if before != offset:
                del self.holders[before]
                self.holders[offset] = copy
                self.slabs.free(before)
        copy.offsets = offsets

    def evict_next(
        self, sizes: tuple[int, ...], count: int, reason: str, now_ns: int, may_lose: bool
    ) -> tuple[int, int]:
        """Evict up to `count` next victims whose slots have these sizes; without `may_lose`, none that is not on SSD.

        Returns (number evicted, number skipped).
        """
        skipped: list[BlockCopy] = []

        def may_take(resident: Resident) -> bool:
            assert isinstance(resident, BlockCopy)
            if not is_evictable(resident):
                return False
            if not may_lose and not resident.in_slower_tier:
                skipped.append(resident)
                return False
            return True

        partitions = [each for each in self._partitions.values() if each.sizes == sizes]
        evicted = 0
        while evicted < count and partitions:
            # Those with a quota have partitions to themselves: the one whose next victim was used longest ago is first.
            heads = [self._victims(each, now_ns, 1) if len(partitions) > 1 else [] for each in partitions]
            partition = min(
                zip(heads, partitions, strict=True), key=lambda each: each[0][0].last_use if each[0] else math.inf
            )[1]
            if self._pop(partition, reason, now_ns, may_take):
                evicted += 1
            else:
                partitions.remove(partition)
        for copy in skipped:
            self.offer(copy)
        return evicted, len(skipped)

    def adopt(self, copy: BlockCopy, offset: int) -> bool:
        """Allocate the slot at `offset` for a copy that is stored there. Returns False if impossible."""
        (size,) = copy.block.namespace.sizes[self._tier]
        if not self.slabs.adopt(size, offset):
            return False
        self.assign(copy, (offset,))
        return True

    def complete(self, copy: BlockCopy, use: Use) -> None:
        """Record that the copy is complete. The caller must then `insert` it."""
        copy.ready = True
        copy.born_ns = copy.used_ns = self._now_ns = use.now_ns
        self._num_uses += 1
        copy.last_use = self._num_uses

    def insert(self, copies: Sequence[BlockCopy], use: Use) -> None:
        """Pass complete copies of one namespace to its partition's policy."""
        if not copies:
            return
        partition = copies[0].block.namespace.partitions[self._tier]
        insert = partition.policy.insert
        for copy in copies:
            insert(copy, use)
        partition.num_copies += len(copies)
        self.num_copies += len(copies)

    def hit(self, copies: Sequence[BlockCopy], use: Use) -> None:
        """Record that a request used these copies of one namespace, in the order of its chain."""
        if not copies:
            return
        hit = copies[0].block.namespace.partitions[self._tier].policy.hit
        now_ns, num_uses = use.now_ns, self._num_uses
        for copy in copies:
            hit(copy, use)
            num_uses += 1
            copy.last_use = num_uses
            copy.used_ns = now_ns
            copy.promoted = False
        self._num_uses, self._now_ns = num_uses, now_ns
        for copy in copies:
            if not copy.block.prefix_node.following(self._tier):
                self.offer(copy)

    def offer(self, copy: BlockCopy) -> None:
        """Offer the copy to its policy for eviction, if it is evictable now."""
        if is_evictable(copy):
            copy.block.namespace.partitions[self._tier].policy.offer(copy)

    def leave(self, copy: BlockCopy) -> None:
        """Remove the copy from its policy for another reason than room. Its slots stay used until `free`."""
        assert copy.ready
        partition = copy.block.namespace.partitions[self._tier]
        partition.policy.remove(copy)
        partition.num_copies -= 1
        self.num_copies -= 1

    def free(self, copy: BlockCopy) -> None:
        """Free the copy's slots, which must not be in use any more; those on SSD are withheld until `take_freed`."""
        self._unassign(copy)
        recipient = self._recipient
        if (
            recipient is not None
            and recipient.block.namespace.sizes == copy.block.namespace.sizes
            and not any(self.slabs.is_high(offset) for offset in copy.offsets)
        ):
            self.assign(recipient, copy.offsets)
            self._recipient = None
            return
        for offset in copy.offsets:
            del self.holders[offset]
        if self._tier != DRAM:
            self.freed |= dict.fromkeys(copy.offsets, copy.nbytes)
            self.freed_nbytes += copy.nbytes
        else:
            self.free_slots(copy.offsets)

    def hand_over(self, copy: BlockCopy) -> tuple[int, ...]:
        """Return the copy's slots; they stay used, without a holder, until `free_slots`."""
        for offset in copy.offsets:
            del self.holders[offset]
        self._unassign(copy)
        return copy.offsets

    def free_slots(self, offsets: tuple[int, ...] | list[int]) -> None:
        """Free slots that have no holder."""
        for offset in offsets:
            self.slabs.free(offset)

    def refuse(self, offsets: Sequence[int]) -> None:
        """Schedule extents that belong to no block, and are not allocated, to be returned by `take_freed`."""
        self._refused += offsets

    def take_freed(self) -> list[int]:
        """Return the offsets of withheld slots, which are free from now on, and of refused extents, each once."""
        freed = list(self.freed)
        refused, self._refused = self._refused, []
        refused = [
            offset for offset in dict.fromkeys(refused) if offset not in self.holders and offset not in self.freed
        ]
        self.free_slots(freed)
        self.freed.clear()
        self.freed_nbytes = 0
        return freed + refused

    def next_victims(self, now_ns: int, count: int) -> list[BlockCopy]:
        """Return up to `count` next victims of each partition."""
        return [
            victim
            for partition in self._partitions.values()
            if partition.num_copies
            for victim in self._victims(partition, now_ns, count)
        ]

    def evict_for(
        self, namespace: NamespaceState, reason: str, now_ns: int, recipient: BlockCopy | None = None
    ) -> bool:
        """Evict copies to make room for one of this namespace. Returns False, and evicts nothing, if impossible.

        `recipient` is the copy to make room for; it may get its slots directly from an evicted copy of the same sizes.
        """
        own = namespace.partitions[self._tier]
        if own.num_copies == self.num_copies:
            return self._evict_one(own, reason, now_ns, recipient)
        others = [each for each in self._partitions.values() if each.num_copies]
        heads = [(victims[0].last_use, each) for each in others if (victims := self._victims(each, now_ns, 1))]
        heads.sort(key=lambda head: head[0])
        same = next((last_use for last_use, each in heads if each.sizes == own.sizes), None)
        if same is not None and self._until_clearing[own.sizes] > 0:
            self._until_clearing[own.sizes] -= 1
            heads = [head for head in heads if head[1].sizes == own.sizes]
        last_use = _newest_last_use if self._keeps_to_recency else _mean_last_use
        for _, partition in heads:
            if partition.sizes == own.sizes:
                return self._evict_one(partition, reason, now_ns, recipient)
            victims = self._victims(partition, now_ns, _NUM_LOOKED_AT)
            clearing = plan_clearing(self._tier, self.slabs, self.holders, self.freed, own.sizes, victims, last_use)
            if clearing is not None and clearing.copies and (same is None or clearing.last_use <= same):
                for copy in clearing.copies:
                    self.leave(copy)
                    self._give_up(copy, "slab", now_ns)
                if self._tier == DRAM:
                    for size, first_unit in clearing.slabs:
                        self.slabs.open(size, first_unit)
                return True
            self._until_clearing[own.sizes] = _BETWEEN_CLEARINGS
        return False

    def make_room(self, namespace: NamespaceState, nbytes: int, spare_until: float, now_ns: int) -> None:
        """Evict from SSD until `nbytes` are withheld for `take_freed`, or nothing can be evicted."""
        self.spare_until = spare_until
        while self.freed_nbytes < nbytes and self.evict_for(namespace, "room", now_ns):
            pass
        self.spare_until = math.inf

    def retain(self, now_ns: int, namespace: NamespaceState, keys: Sequence[bytes], request: RetainRequest) -> bool:
        """Retain the blocks of a prefix; return False if there is no room for it among the retained ones."""
        policy = namespace.partitions[self._tier].policy
        return policy.retain(now_ns, keys, namespace.nbytes[self._tier], request)

    def admits(self, copy: BlockCopy, use: Use) -> bool:
        """Return True if the copy is worth the eviction of another."""
        return copy.block.namespace.partitions[self._tier].policy.admits(copy, use)

    def validate(self) -> list[str]:
        """Return descriptions of all inconsistencies; empty if the state is consistent."""
        problems = self.slabs.validate()
        if any(offset not in copy.offsets or copy.tier != self._tier for offset, copy in self.holders.items()):
            problems.append("a slot's holder has other offsets or belongs to another tier")
        inserted = {id(copy): copy for copy in self.holders.values() if copy.ready and not copy.gone}.values()
        counted = [partition.num_copies for partition in self._partitions.values()]
        if not len(inserted) == self.num_copies == sum(counted):
            problems.append("the partitions' counts of copies are wrong")
        if sum(self.freed.values()) != self.freed_nbytes:
            problems.append("the count of freed bytes is wrong")
        offered = {id(copy) for copy in self.next_victims(self._now_ns, len(inserted))}
        if missing := [copy for copy in inserted if self._may_take(copy) and id(copy) not in offered]:
            problems.append(f"{len(missing)} evictable copies are not offered")
        return problems

    def assign(self, copy: BlockCopy, offsets: tuple[int, ...]) -> None:
        """Make allocated slots those of the copy."""
        copy.offsets = offsets
        for offset in offsets:
            self.holders[offset] = copy
        namespace = copy.block.namespace
        namespace.used_nbytes[self._tier] += copy.nbytes
        namespace.num_copies += 1

    def _unassign(self, copy: BlockCopy) -> None:
        namespace = copy.block.namespace
        namespace.used_nbytes[self._tier] -= copy.nbytes
        namespace.num_copies -= 1

    def _evict_one(self, partition: Partition, reason: str, now_ns: int, recipient: BlockCopy | None) -> bool:
        self._recipient = recipient
        is_evicted = self._pop(partition, reason, now_ns, self._may_take)
        self._recipient = None
        return is_evicted

    def _pop(self, partition: Partition, reason: str, now_ns: int, may_take: Callable[[Resident], bool]) -> bool:
        victim = partition.policy.pop(now_ns, may_take)
        if victim is None:
            return False
        assert isinstance(victim, BlockCopy)
        partition.num_copies -= 1
        self.num_copies -= 1
        self._give_up(victim, reason, now_ns)
        return True

    def _victims(self, partition: Partition, now_ns: int, count: int) -> list[BlockCopy]:
        victims = partition.policy.next_victims(now_ns, count, self._may_take)
        return [victim for victim in victims if isinstance(victim, BlockCopy)]


def _may_take(resident: Resident) -> bool:
    assert isinstance(resident, BlockCopy)
    return is_evictable(resident)


def _may_take_from_ssd(space: TierSpace) -> Callable[[Resident], bool]:
    def may_take(resident: Resident) -> bool:
        assert isinstance(resident, BlockCopy)
        dram = resident.block.dram
        return is_evictable(resident) and (dram is None or dram.last_use > space.spare_until)

    return may_take


_MAX_UNUSED = 16  # namespaces without blocks whose state, with all that their policies have learnt, is kept


class NamespaceTable:
    """States of namespaces. A namespace without blocks may return with another spec."""

    def __init__(self, dram: TierSpace, ssd: TierSpace, quotas: Mapping[bytes, int]) -> None:
        self._dram = dram
        self._ssd = ssd
        self._quotas = quotas
        self._namespaces: dict[bytes, NamespaceState] = {}

    @property
    def num_blocks(self) -> Counter[bytes]:
        """Number of blocks per namespace, in any tier."""
        return Counter({f.kv_namespace: f.num_blocks for f in self._namespaces.values() if f.num_blocks})

    def get(self, kv_namespace: bytes) -> NamespaceState | None:
        """Return the state of a namespace; None if it is unknown."""
        return self._namespaces.get(kv_namespace)

    def of(self, kv_namespace: bytes, spec: KvSpec) -> NamespaceState:
        """Return the state of the namespace, created if missing.

        Raises SpecMismatch if it has blocks of another spec, SpecError if a slot is too large for the arena.
        """
        known = self._namespaces.get(kv_namespace)
        if known is not None and (known.spec is spec or known.spec == spec):
            return known
        if known is not None and known.num_copies:
            raise SpecMismatch(f"namespace {kv_namespace.hex()} holds blocks of {known.spec}, not of {spec}")
        for g in range(spec.num_groups):
            if not self._dram.slabs.fits(spec.slot_nbytes(g)):
                raise SpecError(f"a slot of group {g} takes {spec.slot_nbytes(g)} bytes: the arena is too small for it")
        slots = tuple(self._dram.slabs.slot_nbytes(spec.slot_nbytes(g)) for g in range(spec.num_groups))
        extent = (self._ssd.slabs.slot_nbytes(spec.block_nbytes),)
        quota_nbytes = self._quotas.get(kv_namespace)
        partitions = (
            self._dram.partition(b"" if quota_nbytes is None else kv_namespace, slots),
            self._ssd.partition(b"", extent),
        )
        unused = [namespace for namespace in self._namespaces.values() if not namespace.num_copies]
        for namespace in [*unused[:-_MAX_UNUSED], *([] if known is None else [known])]:
            if self._namespaces.pop(namespace.kv_namespace, None) is not None:
                for space, partition in zip((self._dram, self._ssd), namespace.partitions, strict=True):
                    space.forget(partition)
        made = NamespaceState(
            kv_namespace,
            spec,
            (slots, extent),
            (sum(slots), sum(extent)),
            partitions,
            tuple(8 * spec.num_layers(g) for g in range(spec.num_groups)),
            (quota_nbytes, None),
        )
        self._namespaces[kv_namespace] = made
        return made

    def in_use(self) -> list[NamespaceState]:
        """Return the states of the namespaces that have blocks here."""
        return [each for each in self._namespaces.values() if each.num_blocks and each.num_copies]
