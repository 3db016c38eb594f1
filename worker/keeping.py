"""What of a sequence's KV is kept for later requests and found by them: whole blocks, and the partial one after them.

Pure: keys and counts. A partial block is found by its tokens: a pool node offers those that follow a run of blocks, and
the reader takes one whose key is that of its own next tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from kvpool import Tail, chain_keys, tail_key, tail_keys
from worker.request import Request, Sequence


@dataclass(frozen=True, slots=True)
class Kept:
    """The blocks of a sequence as far as it was computed, prompt and answer."""

    keys: tuple[bytes, ...]  # chain key per whole block
    tail_key: bytes = b""  # of the partial block after them; empty where there is none
    tail_tokens: int = 0

    @classmethod
    def of(cls, sequence: Sequence, block_tokens: int) -> Kept:
        """All that was computed so far. A sequence's last token is never fed back, so its KV does not exist; what the
        engine went on to compute after an answer's end is not worth a place."""
        request, computed = sequence.request, sequence.num_computed
        if sequence.kept_tokens is not None:
            computed = min(computed, sequence.kept_tokens)
        keys = list(request.keys[: computed // block_tokens])
        rest = np.ascontiguousarray(sequence.tokens[len(keys) * block_tokens : computed])
        more = chain_keys(request.chain_seed, rest, block_tokens, parent=keys[-1] if keys else None)
        keys += [row.tobytes() for row in more]
        last = rest[len(more) * block_tokens :]
        if not len(last):
            return cls(tuple(keys))
        return cls(tuple(keys), tail_key(request.chain_seed, keys[-1] if keys else None, last), len(last))

    def whole(self) -> Kept:
        """Without the partial block."""
        return Kept(self.keys)

    @property
    def num_blocks(self) -> int:
        """With the partial one."""
        return len(self.keys) + bool(self.tail_tokens)

    def num_tokens(self, block_tokens: int) -> int:
        return len(self.keys) * block_tokens + self.tail_tokens

    def names(self, first: int) -> tuple[list[bytes], list[bytes], list[int]]:
        """(keys, parents' keys, tokens of partial blocks and 0 for whole ones) of the blocks from `first` on."""
        keys = [*self.keys, self.tail_key] if self.tail_tokens else list(self.keys)
        parents = [keys[i - 1] if i else bytes(16) for i in range(first, len(keys))]
        partial = [self.tail_tokens if i == len(self.keys) else 0 for i in range(first, len(keys))]
        return keys[first:], parents, partial


def names_of_tails(request: Request, num_blocks: int, block_tokens: int) -> bytes:
    """Keys of all partial blocks that hold just the prompt's tokens after its first `num_blocks` blocks, the longest
    first."""
    start = num_blocks * block_tokens
    rest = request.prompt[start : start + block_tokens - 1]
    parent = request.keys[num_blocks - 1] if num_blocks else None
    return tail_keys(request.chain_seed, parent, rest)[::-1].tobytes()


def find_tail(request: Request, num_blocks: int, tails: Many[Tail], block_tokens: int) -> tuple[Tail, int] | None:
    """(the offered partial block that holds most of the prompt's tokens after its first `num_blocks` blocks, how many).

    All tokens of a tail must be the prompt's; the prompt's last token is computed even where the tail has its KV.
    """
    start = num_blocks * block_tokens
    rest = request.prompt[start : start + block_tokens]
    usable = len(request.prompt) - 1 - start
    parent = request.keys[num_blocks - 1] if num_blocks else None
    offered = {(tail.key, tail.num_tokens): tail for tail in tails if usable > 0 and 0 < tail.num_tokens <= len(rest)}
    for count in sorted({num_tokens for _, num_tokens in offered}, reverse=True):
        tail = offered.get((tail_key(request.chain_seed, parent, rest[:count]), count))
        if tail is not None:
            return tail, min(count, usable)
    return None
