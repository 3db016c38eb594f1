"""Retention: prefixes that one tier keeps in preference over other blocks until a lifetime ends. Pure.

A request may announce that its prompt will be used again, as agents do that wait for a tool. `Retention` records such
prefixes, and `RetainingPolicy` wraps any eviction policy, so that it evicts none of their blocks as long as it can
evict another. All else stays as the wrapped policy decides.

An announcement cannot be verified, so it is bounded: the prefixes of one tenant take at most its share of the tier.
The other tenants keep at least the hits that they would have in a tier without this share. Prefixes are kept whole or
not at all, because a part of a prefix saves a part of a prefill, and holds its bytes for the whole pause all the same.
If there is no room for all of a tenant's prefixes, those are kept whose priority is lowest, and among equals those that
are expected to be used soonest: that is the highest number of hits per byte and second. The longer a prefix is overdue,
the later its use is expected.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvpool.policy.eviction.base import EvictionPolicy, Resident, Use

_MAX_KEYS_PER_BLOCK = 4  # bounds the memory of prefixes that share blocks, per block that may be retained


@dataclass(frozen=True, slots=True)
class RetainRequest:
    """Announcement that a prefix will be used again. Times in nanoseconds."""

    tenant: str  # "": the cluster has no tenants
    lifetime_ns: int  # the prefix is kept for at most this time after it was retained or used
    pause_ns: int = 0  # expected time until the next use; 0: unknown
    priority: int = 0  # among the tenant's prefixes; lower ones first


@dataclass(slots=True, eq=False)
class _RetainedPrefix:
    """Prefix that is retained until `ends_ns`; `due_ns` is the time of its expected use."""

    request: RetainRequest
    keys: Sequence[object]  # empty when it has ended
    block_nbytes: int
    policy: "RetainingPolicy"
    due_ns: int
    ends_ns: int
    queued_ns: int  # time of its first entry in the heap of ends, at most `ends_ns`
    is_awaited: bool = False  # the request that uses it has arrived, and waits for its turn
    is_used: bool = False  # the expected use has happened

    def loss_rank(self, now_ns: int) -> tuple[int, int]:
        """Return the sort key of prefixes; the highest one is given up first."""
        # Overdue prefixes are expected to be overdue as long again.
        return self.request.priority, 0 if self.is_awaited else abs(self.due_ns - now_ns)

    def is_replaced_by(self, longer: "_RetainedPrefix") -> bool:
        """Return True if this prefix has served its purpose: `longer`, which contains it, continues it."""
        return self.is_used and self.request.tenant == longer.request.tenant and self.policy is longer.policy


@dataclass(slots=True)
class _TenantPrefixes:
    """Retained prefixes of one tenant. Blocks of several of them are counted once."""

    prefixes: dict[_RetainedPrefix, None] = field(default_factory=dict)
    counts: dict[object, int] = field(default_factory=dict)  # prefixes that contain the block, by key
    nbytes: int = 0

    def missing_nbytes(self, keys: Sequence[object], block_nbytes: int) -> int:
        return block_nbytes * sum(key not in self.counts for key in keys)

    def exclusive_nbytes(self, prefix: _RetainedPrefix, but: set[object]) -> int:
        """Return the bytes of blocks that no other prefix and no key of `but` retains."""
        counts = self.counts
        return prefix.block_nbytes * sum(counts[key] == 1 and key not in but for key in prefix.keys)


class Retention:
    """Retained prefixes of one tier, whose partitions' policies share it."""

    def __init__(self, capacity_nbytes: int, share: float, tenant_share: float) -> None:
        """Let all tenants together retain at most `share` of `capacity_nbytes`, and each of them `tenant_share`.

        Without tenants, the second limit does not apply.
        """
        self.num_preempted = 0  # prefixes that yielded to one that is used sooner, or for lack of other victims
        self.num_refused = 0
        self._share = share
        self._tenant_share = min(share, tenant_share)
        self.resize(capacity_nbytes)
        self._tenants: dict[str, _TenantPrefixes] = {}
        self._counts: dict[object, int] = {}  # prefixes of all tenants that contain the block, by key
        self._by_last: dict[object, list[_RetainedPrefix]] = {}  # by the key of their last block
        # Heap of (time, serial number, prefix). A prefix may end later than its entry says, never earlier.
        self._ends: list[tuple[int, int, _RetainedPrefix]] = []
        self._num_prefixes = 0
        self._num_keys = 0  # in all prefixes; bounded, because prefixes may share their blocks
        self._serial = 0
        self._nbytes = 0  # sum over the tenants
        # Blocks that their policy would have evicted, by key. The policy no longer has them in its order.
        self.parked: dict[object, tuple[EvictionPolicy, Resident]] = {}

    def resize(self, capacity_nbytes: int) -> None:
        """Adapt the limits to another capacity of the tier. What is retained stays until its lifetime ends."""
        self._limit_nbytes = int(capacity_nbytes * self._share)
        self._tenant_limit_nbytes = int(capacity_nbytes * self._tenant_share)

    def __len__(self) -> int:
        return self._num_prefixes

    @property
    def nbytes(self) -> int:
        """Bytes of the retained prefixes, in the tier or not; those that tenants share count for each."""
        return self._nbytes

    def nbytes_of(self, tenant: str) -> int:
        """Return the bytes of the tenant's retained prefixes."""
        found = self._tenants.get(tenant)
        return found.nbytes if found is not None else 0

    def by_tenant(self) -> Iterator[tuple[str, int, int]]:
        """Yield (tenant, number of its retained prefixes, their bytes). The caller must have called `expire`."""
        return ((name, len(found.prefixes), found.nbytes) for name, found in self._tenants.items())

    def holds(self, key: object) -> bool:
        """Return True if the block belongs to a retained prefix. The caller must have called `expire`."""
        return key in self._counts

    def retain(
        self,
        now_ns: int,
        keys: Sequence[object],
        block_nbytes: int,
        request: RetainRequest,
        policy: "RetainingPolicy",
    ) -> bool:
        """Retain the blocks of a prefix, whether they are in the tier yet or not, or renew it with another request.

        Returns False if the tenant's share has no room for it beside the prefixes that are used sooner.
        """
        self.expire(now_ns)
        if not keys or request.lifetime_ns <= 0:
            return False
        due_ns = now_ns + (request.pause_ns or request.lifetime_ns)
        ends_ns = now_ns + request.lifetime_ns
        for known in self._by_last.get(keys[-1], ()):
            if known.request.tenant == request.tenant and known.policy is policy:
                known.request, known.due_ns, known.is_awaited, known.is_used = request, due_ns, False, False
                self._end_at(known, ends_ns)
                return True
        tenant = self._tenants.get(request.tenant) or _TenantPrefixes()
        prefix = _RetainedPrefix(request, keys, block_nbytes, policy, due_ns, ends_ns, ends_ns)
        has_place = self._num_keys + len(keys) <= _MAX_KEYS_PER_BLOCK * (self._limit_nbytes // block_nbytes)
        if not has_place or not self._make_room(now_ns, tenant, prefix):
            self.num_refused += 1
            return False
        replaced = [each for key in keys for each in self._by_last.get(key, ()) if each.is_replaced_by(prefix)]
        self._tenants[request.tenant] = tenant
        self._nbytes -= tenant.nbytes
        tenant.nbytes += tenant.missing_nbytes(keys, block_nbytes)
        self._nbytes += tenant.nbytes
        tenant.prefixes[prefix] = None
        for counts in (tenant.counts, self._counts):
            for key in keys:
                counts[key] = counts.get(key, 0) + 1
        self._by_last.setdefault(keys[-1], []).append(prefix)
        self._num_prefixes += 1
        self._num_keys += len(keys)
        self._push(prefix)
        for each in replaced:
            self._end(each)
        return True

    def await_use(self, now_ns: int, keys: Sequence[object]) -> None:
        """Record that a request with this prompt has arrived, and waits: the prefixes in it are used next."""
        for key in keys if self._by_last else ():
            for prefix in self._by_last.get(key, ()):
                prefix.is_awaited = True
                self._end_at(prefix, now_ns + prefix.request.lifetime_ns)

    def used(self, now_ns: int, key: object) -> None:
        """Record the use of a block. The use of a prefix's last block is the expected one.

        Such a prefix is kept for its pause, or its lifetime if the pause is unknown, from this use on: the request must
        be served and stored before a longer prefix takes its place.
        """
        for prefix in self._by_last.get(key, ()):
            request = prefix.request
            prefix.due_ns, prefix.is_awaited, prefix.is_used = now_ns, False, True
            self._end_at(prefix, now_ns + min(request.lifetime_ns, request.pause_ns or request.lifetime_ns))

    def expire(self, now_ns: int) -> None:
        """End the prefixes whose lifetime is over; their blocks are evicted as usual from then on."""
        ends = self._ends
        while ends and ends[0][0] <= now_ns:
            at_ns, _, prefix = heapq.heappop(ends)
            if prefix.ends_ns <= now_ns:
                self._end(prefix)
            elif at_ns == prefix.queued_ns and prefix.keys:
                self._push(prefix)

    def give_up(self, now_ns: int, policy: "RetainingPolicy") -> bool:
        """End the prefix in this policy whose expected use is furthest away. Returns False if there is none."""
        own = [prefix for tenant in self._tenants.values() for prefix in tenant.prefixes if prefix.policy is policy]
        if not own:
            return False
        self.num_preempted += 1
        self._end(max(own, key=lambda prefix: prefix.loss_rank(now_ns)))
        return True

    def _make_room(self, now_ns: int, tenant: _TenantPrefixes, prefix: _RetainedPrefix) -> bool:
        """End prefixes of the tenant that are used later than this one, if that makes room for it."""
        room = self._limit_nbytes - self._nbytes
        if prefix.request.tenant:
            room = min(room, self._tenant_limit_nbytes - tenant.nbytes)
        needed = tenant.missing_nbytes(prefix.keys, prefix.block_nbytes) - room
        if needed <= 0:
            return True
        rank, own = prefix.loss_rank(now_ns), set(prefix.keys)
        later = [each for each in tenant.prefixes if each.loss_rank(now_ns) > rank]
        later.sort(key=lambda each: each.loss_rank(now_ns), reverse=True)
        chosen: list[_RetainedPrefix] = []
        for each in later:
            freed = tenant.exclusive_nbytes(each, own)
            if freed:
                chosen.append(each)
                needed -= freed
            if needed <= 0:
                break
        if needed > 0:
            return False
        for each in chosen:
            self._end(each)
        self.num_preempted += len(chosen)
        return True

    def _end_at(self, prefix: _RetainedPrefix, ends_ns: int) -> None:
        prefix.ends_ns = ends_ns
        if ends_ns < prefix.queued_ns:
            self._push(prefix)

    def _push(self, prefix: _RetainedPrefix) -> None:
        if len(self._ends) > 2 * self._num_prefixes + 64:  # most entries are of prefixes that have ended
            self._ends = [entry for entry in self._ends if entry[2].keys and entry[0] == entry[2].queued_ns]
            heapq.heapify(self._ends)
        self._serial += 1
        prefix.queued_ns = prefix.ends_ns
        heapq.heappush(self._ends, (prefix.ends_ns, self._serial, prefix))

    def _end(self, prefix: _RetainedPrefix) -> None:
        if not prefix.keys:
            return
        name = prefix.request.tenant
        tenant = self._tenants[name]
        del tenant.prefixes[prefix]
        self._num_prefixes -= 1
        self._num_keys -= len(prefix.keys)
        self._by_last[prefix.keys[-1]].remove(prefix)
        if not self._by_last[prefix.keys[-1]]:
            del self._by_last[prefix.keys[-1]]
        for key in prefix.keys:
            if tenant.counts[key] == 1:
                del tenant.counts[key]
                tenant.nbytes -= prefix.block_nbytes
                self._nbytes -= prefix.block_nbytes
            else:
                tenant.counts[key] -= 1
            if self._counts[key] == 1:
                del self._counts[key]
                parked = self.parked.pop(key, None)
                if parked is not None:
                    parked[0].offer(parked[1])
            else:
                self._counts[key] -= 1
        prefix.keys = ()  # its entry in the heap may stay for long
        if not tenant.prefixes:
            del self._tenants[name]


class RetainingPolicy(EvictionPolicy):
    """Evicts as the wrapped policy does, but blocks of retained prefixes only if it can evict no other."""

    def __init__(self, policy: EvictionPolicy, retention: Retention) -> None:
        self.wrapped = policy
        self.retention = retention

    def expect(self, parent: object, depth: int, keys: Sequence[object], last_tokens: int, use: Use) -> None:
        self.wrapped.expect(parent, depth, keys, last_tokens, use)

    def admits(self, block: Resident, use: Use) -> bool:
        return self.retention.holds(block.key) or self.wrapped.admits(block, use)

    def keep_to_recency(self) -> None:
        self.wrapped.keep_to_recency()

    def insert(self, block: Resident, use: Use) -> None:
        self.wrapped.insert(block, use)

    def hit(self, block: Resident, use: Use) -> None:
        self.wrapped.hit(block, use)
        if not use.stores and self.retention.holds(block.key):
            self.retention.used(use.now_ns, block.key)

    def offer(self, block: Resident) -> None:
        self.wrapped.offer(block)

    def pop(self, now_ns: int, may_take: Callable[[Resident], bool]) -> Resident | None:
        retention = self.retention
        retention.expire(now_ns)
        while True:
            victim = self.wrapped.pop(now_ns, self._unless_retained(may_take) if len(retention) else may_take)
            if victim is not None or not retention.give_up(now_ns, self):
                return victim

    def next_victims(self, now_ns: int, count: int, may_take: Callable[[Resident], bool]) -> list[Resident]:
        """Return up to `count` next victims; retained blocks come last, the longest unused first."""
        retention = self.retention
        retention.expire(now_ns)
        if not len(retention):
            return self.wrapped.next_victims(now_ns, count, may_take)
        victims = self.wrapped.next_victims(now_ns, count, self._unless_retained(may_take))
        if len(victims) < count:
            parked = [block for policy, block in retention.parked.values() if policy is self.wrapped]
            parked.sort(key=lambda block: block.used_ns)
            victims += [block for block in parked if may_take(block)][: count - len(victims)]
        return victims

    def remove(self, block: Resident) -> None:
        self.retention.parked.pop(block.key, None)
        self.wrapped.remove(block)

    def retain(self, now_ns: int, keys: Sequence[object], block_nbytes: int, request: RetainRequest) -> bool:
        """Retain a prefix of blocks of `block_nbytes` each, see `Retention.retain`."""
        return self.retention.retain(now_ns, keys, block_nbytes, request, self)

    def _unless_retained(self, may_take: Callable[[Resident], bool]) -> Callable[[Resident], bool]:
        retention, wrapped = self.retention, self.wrapped

        def may_take_unretained(block: Resident) -> bool:
            if not may_take(block):
                return False
            if retention.holds(block.key):
                retention.parked[block.key] = wrapped, block
                return False
            return True

        return may_take_unretained
