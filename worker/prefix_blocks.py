"""Blocks of a prompt's prefix: what a request has leased from a pool node, and what a sequence saves for later
requests.

Keys, counts and arrays only; no I/O. Saved blocks are whole ones and the partial one after them. A partial block is
found by its tokens: a pool node offers those that follow a run of blocks, and the reader picks one whose key matches
its own next tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvpool import KvSpec, Lease, PoolClient, Provenance, Tail, chain_keys, kv_namespace, tail_key, tail_keys
from worker.request import EngineSequence, Request


@dataclass(frozen=True, slots=True)
class StoredPart:
    """KV groups that are stored together, under a namespace of their own."""

    groups: tuple[int, ...]  # of the worker's spec
    spec: KvSpec  # of these groups
    kv_namespace: bytes
    is_windowed: bool
    is_chained: bool  # the pool evicts no block before those that follow it


@dataclass(frozen=True, slots=True)
class StoredParts:
    """The parts of a model's KV: of lasting groups every block is stored, of windowed ones those at ends of sequences.

    A block has the same key in both. `windowed` is None for a model without windowed groups, `lasting` for a model
    with windows in all layers.
    """

    lasting: StoredPart | None
    windowed: StoredPart | None
    window_blocks: int

    @classmethod
    def of(cls, identity: str, spec: KvSpec, provenance: Provenance = Provenance.EXACT) -> StoredParts:
        """Return the parts of `spec` for the weights, or the computation, named `identity`."""

        def part(groups: tuple[int, ...]) -> StoredPart | None:
            if not groups:
                return None
            name, is_windowed = kv_namespace(identity, spec.part(groups), provenance), groups == spec.windowed
            return StoredPart(groups, spec.part(groups), name, is_windowed, is_chained=not is_windowed)

        return cls(part(spec.lasting), part(spec.windowed), spec.window_blocks)

    @classmethod
    def of_hidden(cls, identity: str, spec: KvSpec, group: int) -> StoredParts:
        """Return one group of hidden states, of which any block may be missing."""
        part = spec.part((group,))
        name = kv_namespace(identity, part)
        return cls(StoredPart((group,), part, name, is_windowed=False, is_chained=False), None, 0)

    @property
    def all(self) -> list[StoredPart]:
        """Both parts, or the only one."""
        return [part for part in (self.lasting, self.windowed) if part is not None]

    @property
    def kv_namespace(self) -> bytes:
        """Namespace of the first part, which identifies the model's KV in the cluster."""
        return self.all[0].kv_namespace

    def __getitem__(self, is_windowed: bool) -> StoredPart:
        part = self.windowed if is_windowed else self.lasting
        assert part is not None
        return part


@dataclass(frozen=True, slots=True)
class PrefixSave:
    """Blocks of a sequence's computed tokens, prompt and answer, to be saved for later requests."""

    keys: tuple[bytes, ...]  # chain key per whole block
    tail_key: bytes = b""  # key of the partial block after them; empty if there is none
    tail_tokens: int = 0

    @classmethod
    def of(cls, sequence: EngineSequence, block_tokens: int) -> PrefixSave:
        """Return the blocks of all tokens computed so far.

        The last token of a sequence is never an input, so it has no KV. Tokens computed beyond `kept_tokens`, the end
        of the answer, are not saved.
        """
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

    def whole(self) -> PrefixSave:
        """Return a copy without the partial block."""
        return PrefixSave(self.keys)

    def head(self, num_blocks: int) -> PrefixSave:
        """Return the first `num_blocks` whole blocks."""
        return PrefixSave(self.keys[:num_blocks])

    @property
    def num_blocks(self) -> int:
        """Number of blocks, the partial one included."""
        return len(self.keys) + bool(self.tail_tokens)

    def num_tokens(self, block_tokens: int) -> int:
        """Return the number of tokens in all blocks."""
        return len(self.keys) * block_tokens + self.tail_tokens

    def names(self, first: int, *, alone: bool = False) -> tuple[list[bytes], list[bytes], list[int]]:
        """Return (keys, parents' keys, tokens of partial blocks and 0 for whole ones) of the blocks from `first` on.

        `alone`: whole blocks have no parent, as in windowed groups and of hidden states. The pool evicts no block
        before those that follow it, but of a window the first blocks are the first that nobody needs.
        """
        keys = [*self.keys, self.tail_key] if self.tail_tokens else list(self.keys)
        partial = [self.tail_tokens if i == len(self.keys) else 0 for i in range(first, len(keys))]
        chained_from = len(self.keys) if alone else 1
        parents = [keys[i - 1] if i and i >= chained_from else bytes(16) for i in range(first, len(keys))]
        return keys[first:], parents, partial


def names_of_tails(request: Request, num_blocks: int, block_tokens: int) -> bytes:
    """Return the keys of all partial blocks made of the prompt's tokens after its first `num_blocks` blocks.

    Longest first, concatenated.
    """
    start = num_blocks * block_tokens
    rest = request.prompt[start : start + block_tokens - 1]
    parent = request.keys[num_blocks - 1] if num_blocks else None
    return tail_keys(request.chain_seed, parent, rest)[::-1].tobytes()


def find_tail(request: Request, num_blocks: int, tails: Sequence[Tail], block_tokens: int) -> tuple[Tail, int] | None:
    """Return the partial block in `tails` that holds most of the prompt's next tokens, and how many; None if none fits.

    The next tokens are those after the prompt's first `num_blocks` blocks. All tokens of a partial block must match the
    prompt; the prompt's last token is computed even if the block holds its KV.
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


@dataclass(slots=True, eq=False)
class PinnedBlocks:
    """Leased blocks of a prompt: whole ones from block `first` on, then, if `tail` is set, a partial one.

    The arrays have a row per block, including the partial one. `is_windowed`: of the windowed groups, not the lasting
    ones.
    """

    first: int
    lease: Lease
    client: PoolClient
    is_own: bool  # at this host's pool node
    block_tokens: int
    tail: Tail | None = None
    tail_tokens: int = 0  # tokens of the partial block that the prompt can use
    is_windowed: bool = False
    offsets: NDArray[np.int64] = field(init=False)  # [groups, n], in the pool's region
    digests: list[NDArray[np.uint64]] = field(init=False)  # per group [n, layers], over the valid tokens
    keys: NDArray[np.uint8] = field(init=False)  # [n, 16]
    valid: NDArray[np.int32] = field(init=False)  # [n] tokens
    right: range = range(0)  # rows that were read and verified

    def __post_init__(self) -> None:
        lease, tail = self.lease, self.tail
        self.offsets, self.digests, self.keys = lease.offsets, lease.digests, lease.chain
        self.valid = np.full(lease.num_blocks, self.block_tokens, np.int32)
        if tail is not None:
            self.offsets = np.concatenate([self.offsets, tail.offsets[:, None]], axis=1)
            self.digests = [np.concatenate([a, b[None]]) for a, b in zip(self.digests, tail.digests, strict=True)]
            self.keys = np.concatenate([self.keys, np.frombuffer(tail.key, np.uint8)[None]])
            self.valid = np.append(self.valid, np.int32(tail.num_tokens))

    @property
    def num_rows(self) -> int:
        """Number of blocks, including the partial one."""
        return len(self.valid)

    @property
    def end(self) -> int:
        """Index in the prompt of the block after the last whole one."""
        return self.first + self.lease.num_blocks

    def tokens_by_tier(self, num_tokens: int, *, after_block: int = 0) -> tuple[int, int, int]:
        """Return (tokens from this host's memory, from its SSD, from another host) among the prompt's first
        `num_tokens`.

        Blocks from SSD are assumed to be the last of the run: later blocks are used less and leave memory first. A
        window also counts the tokens before it from `after_block` on: they are reused, although no layer reads them.
        """
        begins = (self.first + np.arange(self.num_rows)) * self.block_tokens
        used = np.clip(num_tokens - begins, 0, self.valid)
        used = used[self.right.start : self.right.stop]
        unread = max(0, self.first - after_block) * self.block_tokens if self.is_windowed and used.any() else 0
        if not self.is_own:
            return 0, 0, int(used.sum()) + unread
        ssd_end = max(0, self.lease.num_blocks - self.right.start)  # the partial block does not count
        ssd = int(used[max(0, ssd_end - self.lease.ssd_blocks) : ssd_end].sum())
        return int(used.sum()) + unread - ssd, ssd, 0


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """Leases of one request: blocks of the lasting groups, and the last ones of the prefix in windowed groups."""

    blocks: list[PinnedBlocks]
    windows: list[PinnedBlocks] = field(default_factory=list)
    branch: int = 0  # blocks that pools hold although nothing can go on after them, for want of a window; 0: none

    def whole(self) -> PinnedPrefix:
        """Return the leases without partial blocks."""

        def without(pins: list[PinnedBlocks]) -> list[PinnedBlocks]:
            return [replace(pin, tail=None, tail_tokens=0) for pin in pins]

        return PinnedPrefix(without(self.blocks), without(self.windows), self.branch)

    @property
    def all(self) -> list[PinnedBlocks]:
        """All leases."""
        return [*self.blocks, *self.windows]

    @property
    def ending(self) -> list[PinnedBlocks]:
        """Leases of which the last one ends the prefix: of the lasting groups, or if there are none, the windowed."""
        return self.blocks or self.windows


def key_array(keys: Sequence[bytes]) -> NDArray[np.uint8]:
    """Pack keys for the pool's client: uint8 [n, 16]."""
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 16)
