"""Pool of blocks under one of the live pool's eviction policies, without data and leases.

With `leaf_first` the pool follows the live pool's rule: a block is evicted only after its successors, and if a block
cannot be stored, neither can its successors. Otherwise any block may be evicted, as policies of the literature assume.
"""

from collections.abc import Callable, Hashable, Sequence

from kvpool.policy.eviction import EvictionPolicy, Resident, RetainingPolicy, RetainRequest, Retention, Use


class SimulatedPool:
    """Blocks by key. A chain is a prompt's blocks in order; equal keys have an equal prefix."""

    def __init__(
        self, policy: EvictionPolicy, capacity: int, *, leaf_first: bool, retention: Retention | None = None
    ) -> None:
        """`capacity` is in the unit of the blocks' sizes (see `store`).

        `retention`: of prefixes that are announced by `retain`; None: there are none.
        """
        self.present: dict[object, Resident] = {}
        self.evictions = 0
        self.not_stored = 0
        self._retaining = None if retention is None else RetainingPolicy(policy, retention)
        self._policy = policy if self._retaining is None else self._retaining
        self.used = 0  # sum of the sizes of all blocks
        self._capacity = capacity
        self._leaf_first = leaf_first
        self._num_children: dict[object, int] = {}  # kept with `leaf_first` only
        self._may_take: Callable[[Resident], bool] = self._is_leaf if leaf_first else _always

    def look_up(self, chain: Sequence[Hashable], use: Use) -> int:
        """Return the number of leading blocks present, and mark each as used."""
        # Hot path: most of a simulation's time is spent here.
        find, hit, now_ns = self.present.get, self._policy.hit, use.now_ns
        hits = 0
        for key in chain:
            resident = find(key)
            if resident is None:
                break
            hit(resident, use)
            resident.used_ns = now_ns
            hits += 1
        return hits

    def retain(self, chain: Sequence[Hashable], now_ns: int, request: RetainRequest, *, block_size: int = 1) -> bool:
        """Retain the blocks of a prefix; return False if there is no room for it among the retained ones."""
        return self._retaining is not None and self._retaining.retain(now_ns, chain, block_size, request)

    def await_use(self, chain: Sequence[Hashable], now_ns: int) -> None:
        """Record that a request with this prompt has arrived and waits."""
        if self._retaining is not None:
            self._retaining.retention.await_use(now_ns, chain)

    def use(self, resident: Resident, use: Use) -> None:
        """Mark a present block as used by a request."""
        self._policy.hit(resident, use)
        resident.used_ns = use.now_ns

    def store(
        self, chain: Sequence[Hashable], start: int, use: Use, last_tokens: int = 0, *, block_size: int = 1
    ) -> None:
        """Store the missing blocks from index `start` on, in order; present ones are marked as used.

        `last_tokens`: tokens of the last block, if it is partial. `block_size`: size of each of them.
        """
        added: list[Resident] = []
        refused: list[Resident] = []
        expected = start  # blocks up to here are present, or the policy expects them
        for depth in range(start, len(chain)):
            key, parent = chain[depth], chain[depth - 1] if depth else None
            resident = self.present.get(key)
            if resident is not None:
                self.use(resident, use)
                continue
            if self._leaf_first and depth and parent not in self.present:
                self.not_stored += len(chain) - depth
                break
            if depth >= expected:
                expected = self._expect(chain, depth, use, last_tokens)
            partial = last_tokens if depth == len(chain) - 1 else 0
            now_ns = use.now_ns
            resident = Resident(
                key, parent, block_size, depth=depth, num_tokens=partial, born_ns=now_ns, used_ns=now_ns
            )
            if not self._try_add(resident, use):
                refused.append(resident)
            elif self._leaf_first:
                added.append(resident)
            else:
                self._policy.insert(resident, use)
                self._policy.offer(resident)
        # As in the live pool, blocks are written first and then sealed together. Only the last is a leaf.
        for resident in added:
            self._policy.insert(resident, use)
        if added:
            self._policy.offer(added[-1])
        for resident in refused:
            self._drop_child(resident.parent)
        self.not_stored += len(refused)

    def remove(self, key: Hashable) -> None:
        """Remove a leaf that is being replaced; no effect if it is absent or has successors."""
        resident = self.present.get(key)
        if resident is not None and self._is_leaf(resident):
            self._policy.remove(resident)
            self._forget(resident)

    def _expect(self, chain: Sequence[Hashable], depth: int, use: Use, last_tokens: int) -> int:
        """Announce the missing blocks from `depth` on to the policy. Returns the depth of the next present one."""
        stop = depth
        while stop < len(chain) and chain[stop] not in self.present:
            stop += 1
        parent = chain[depth - 1] if depth else None
        self._policy.expect(parent, depth, chain[depth:stop], last_tokens if stop == len(chain) else 0, use)
        return stop

    def _try_add(self, resident: Resident, use: Use) -> bool:
        # Counted before evicting, so that the parent cannot be the victim. `store` reverts it for a refused block.
        if self._leaf_first and resident.parent is not None:
            self._num_children[resident.parent] = self._num_children.get(resident.parent, 0) + 1
        if self.used + resident.nbytes > self._capacity and not self._make_room(resident, use):
            return False
        self.present[resident.key] = resident
        self.used += resident.nbytes
        return True

    def _make_room(self, resident: Resident, use: Use) -> bool:
        if not self._policy.admits(resident, use):
            return False
        while self.used + resident.nbytes > self._capacity:
            victim = self._policy.pop(use.now_ns, self._may_take)
            if victim is None:
                return False
            self._forget(victim)
            self.evictions += 1
        return True

    def _forget(self, resident: Resident) -> None:
        del self.present[resident.key]
        self.used -= resident.nbytes
        self._drop_child(resident.parent)

    def _drop_child(self, parent: object) -> None:
        """Remove one child of `parent` (None: no parent); without children, the parent becomes a leaf."""
        if not self._leaf_first or parent is None:
            return
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
            if parent in self.present:
                self._policy.offer(self.present[parent])

    def _is_leaf(self, resident: Resident) -> bool:
        return resident.key not in self._num_children


def _always(resident: Resident) -> bool:
    return True
