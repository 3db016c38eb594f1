"""Prefixes that were copied between pool nodes: found again in prompts, and kept count of. No I/O."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvpool import keys_from_bytes, keys_u64

__all__ = ["CopiedPrefix", "Replicas"]

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


class Replicas:
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
