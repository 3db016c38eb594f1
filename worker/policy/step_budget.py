"""How many prompt tokens a step may compute beside decoding sequences, so that they wait no longer than a bound.

A step of b sequences and n prompt tokens takes about d + p n: d is learned from steps without prompts, p from those
with prompts. Both follow the last steps, since they grow with the contexts.
"""

from __future__ import annotations

from typing import Final

_FOLLOW: Final = 0.3  # weight of the last step


class StepBudget:
    """Learns the times of steps, and bounds their prompt tokens. `bound_s` 0: no bound."""

    def __init__(self, bound_s: float, block_tokens: int) -> None:
        self._bound_s = bound_s
        self._block_tokens = block_tokens
        self._decode_s = 0.0
        self._token_s = 0.0

    def tokens(self, most: int) -> int:
        """Return the prompt tokens of a step beside decoding sequences: at least a block, at most `most`."""
        if not self._bound_s or not self._token_s:
            return most
        fitting = int((self._bound_s - self._decode_s) / self._token_s)
        return min(most, max(self._block_tokens, fitting - fitting % self._block_tokens))

    def observe(self, decode_batch: int, prefill_tokens: int, seconds: float) -> None:
        """Learn from a step that has ended."""
        if prefill_tokens:
            beside_s = self._decode_s if decode_batch else 0.0
            self._token_s = _follow(self._token_s, max(0.0, seconds - beside_s) / prefill_tokens)
        elif decode_batch:
            self._decode_s = _follow(self._decode_s, seconds)


def _follow(known: float, seen: float) -> float:
    """Return the new estimate. What has become slower counts at once: the bound is to be kept."""
    return max(seen, known + _FOLLOW * (seen - known)) if known else seen
