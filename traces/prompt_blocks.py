"""Hash ids of prompts that are given as pieces: ids of another block size, token ids, or pieces that nobody shares."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Self

from traces.row import BLOCK_TOKENS

_DIGEST_BYTES = 16


class PromptBlocks:
    """Blocks of a growing prompt. Equal ids mean equal pieces up to the end of that block.

    An id is the first 63 bits of a hash chained over all blocks before it, so it depends on nothing else than the
    prompt: no table of ids is kept, and files converted separately agree.
    """

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        self._block_tokens = block_tokens
        self._full: list[int] = []
        self._open = _chained(b"")
        self._open_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far."""
        return len(self._full) * self._block_tokens + self._open_tokens

    def copy(self) -> Self:
        """Return an independent copy."""
        made = type(self)(self._block_tokens)
        made._full = self._full.copy()
        made._open = self._open.copy()
        made._open_tokens = self._open_tokens
        return made

    def append(self, name: bytes, num_tokens: int) -> None:
        """Append a piece of `num_tokens` tokens whose contents are identified by `name`."""
        key = hashlib.blake2b(name, digest_size=_DIGEST_BYTES).digest()
        done = 0
        while done < num_tokens:
            part = min(num_tokens - done, self._block_tokens - self._open_tokens)
            self._open.update(b"%b:%d:%d;" % (key, done, part))
            self._take(part)
            done += part

    def append_ids(self, ids: Sequence[int], num_tokens: int, block_tokens: int, *, scope: str = "") -> None:
        """Append `num_tokens` tokens that are given by an id per `block_tokens`; the last block may be partial.

        Ids of different scopes are different.
        """
        within = scope.encode("utf-8", "surrogatepass")
        for position, block_id in enumerate(ids):
            self.append(b"id %d %b" % (block_id, within), min(block_tokens, num_tokens - position * block_tokens))

    def append_tokens(self, ids: Sequence[int]) -> None:
        """Append token ids; how they are divided among calls does not matter."""
        done = 0
        while done < len(ids):
            part = ids[done : done + self._block_tokens - self._open_tokens]
            self._open.update(array("I", part).tobytes())
            self._take(len(part))
            done += len(part)

    def ids(self) -> tuple[int, ...]:
        """Return one id per block; the last block may be partial."""
        return (*self._full, _id(self._open.digest())) if self._open_tokens else tuple(self._full)

    def _take(self, num_tokens: int) -> None:
        self._open_tokens += num_tokens
        if self._open_tokens == self._block_tokens:
            digest = self._open.digest()
            self._full.append(_id(digest))
            self._open, self._open_tokens = _chained(digest), 0


class FreshIds:
    """Ids that no other prompt has, for prompts of unknown contents."""

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        self._block_tokens = block_tokens
        self._next = 0

    def take(self, num_tokens: int) -> tuple[int, ...]:
        """Return the ids of a prompt of `num_tokens` tokens."""
        start = self._next
        self._next += -(-num_tokens // self._block_tokens)
        return tuple(range(start, self._next))


def _chained(digest: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(digest, digest_size=_DIGEST_BYTES)


def _id(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big") >> 1
