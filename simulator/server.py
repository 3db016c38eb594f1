"""One simulated server: a pool node's memory and the queue of the workers beside it."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.policy.eviction import Use, make_policy
from simulator.dialogue_settings import DialogueSettings
from simulator.pool import SimulatedPool

__all__ = ["BlockKey", "Server"]

BlockKey = tuple[int, int, int]
"""(dialogue, or -1 - persona; place in the chain; 0, or the tokens of a partial block)."""


@dataclass(frozen=True, slots=True)
class _Tail:
    key: BlockKey
    place: int
    tokens: int


class Server:
    """Turns are worked off one after the other. What a turn leaves is there as soon as it is placed."""

    def __init__(self, settings: DialogueSettings) -> None:
        self.turns = 0
        self.busy_s = 0.0
        self.pool = SimulatedPool(make_policy(settings.policy, settings.capacity), settings.capacity, leaf_first=True)
        self._settings = settings
        self._free_at_s = 0.0
        self._tails: dict[int, _Tail] = {}  # by dialogue, the last one stored here

    def queue_s(self, now_s: float) -> float:
        """How long a turn that comes now would wait."""
        return max(0.0, self._free_at_s - now_s)

    def held(self, chain: Sequence[BlockKey]) -> int:
        """Leading blocks that are here; asks for a few only, since no block is here without those before it."""
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in self.pool.present:
                low = middle + 1
            else:
                high = middle
        return low

    def reuse(self, dialogue: int, chain: Sequence[BlockKey], use: Use) -> int:
        """Use what is here of a prompt whose full blocks are `chain`. How many of its tokens that spares."""
        found = self.pool.look_up(chain, use)
        tail = self._tails.get(dialogue)
        if tail is not None and tail.place == found and tail.key in self.pool.present:
            self.pool.use(self.pool.present[tail.key], use)
            return found * self._settings.block_tokens + tail.tokens
        return found * self._settings.block_tokens

    def keep(self, dialogue: int, chain: Sequence[BlockKey], tail_tokens: int, use: Use) -> None:
        """Store prompt and answer: `chain` full blocks and a tail. A dialogue's earlier tail makes way."""
        old = self._tails.pop(dialogue, None)
        if old is not None:
            self.pool.remove(old.key)
        start = self.held(chain)
        if tail_tokens and self._settings.tails:
            key = (dialogue, len(chain), tail_tokens)
            self._tails[dialogue] = _Tail(key, len(chain), tail_tokens)
            self.pool.store([*chain, key], start, use, tail_tokens)
        else:
            self.pool.store(chain, start, use)

    def work(self, now_s: float, prefill_tokens: int, decode_tokens: int) -> float:
        """Put a turn into the queue. When its answer is there."""
        work_s = (
            prefill_tokens / self._settings.prefill_tokens_per_s + decode_tokens / self._settings.decode_tokens_per_s
        )
        self._free_at_s = now_s + self.queue_s(now_s) + work_s
        self.busy_s += work_s
        self.turns += 1
        return self._free_at_s
