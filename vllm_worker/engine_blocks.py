"""The blocks in vLLM's own prefix cache by chain key, from vLLM's KV events.

vLLM names a block by a hash of its own. The events that store blocks carry their tokens; the first block of a prompt
also carries its salt, which is the seed of its chain (`vllm_worker.runner`). A block whose chain is not known for
certain, and what follows it, is left out: its key could be wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvpool.address import KEY_NBYTES, chain_keys

log = logging.getLogger(__name__)

_GROUPS: Final = (None, 0)
_MEDIA: Final = (None, "GPU")  # so does vLLM name the memory of its device, also on a CPU
KeyChange = Callable[[bytes], None]


@dataclass(slots=True)
class _Cached:
    seed: bytes
    key: bytes
    copies: int = 1  # blocks with these tokens


class EngineBlocks:
    """Blocks that vLLM's prefix cache holds, by vLLM's hash. Pure: events in, calls out."""

    def __init__(self, block_tokens: int, on_stored: KeyChange, on_removed: KeyChange) -> None:
        """`on_stored(key)` and `on_removed(key)` are called once when a chain key (16 bytes) is there, and is gone."""
        self._block_tokens = block_tokens
        self._on_stored = on_stored
        self._on_removed = on_removed
        self._cached: dict[Any, _Cached] = {}

    def __len__(self) -> int:
        return len(self._cached)

    def apply(self, event: Any) -> None:
        """Apply one event: a BlockStored, BlockRemoved or AllBlocksCleared of `vllm.distributed.kv_events`.

        Events of unknown kinds are ignored.
        """
        match type(event).__name__:
            case "BlockStored":
                self._store(event)
            case "BlockRemoved":
                if event.group_idx in _GROUPS and event.medium in _MEDIA:
                    self._remove(event.block_hashes)
            case "AllBlocksCleared":
                self.clear()

    def clear(self) -> None:
        """Forget all blocks: vLLM has dropped them, or events were lost."""
        cached, self._cached = self._cached, {}
        for block in cached.values():
            self._on_removed(block.key)

    def _store(self, event: Any) -> None:
        hashes, tokens = event.block_hashes, event.token_ids
        if (
            event.block_size != self._block_tokens
            or len(tokens) != len(hashes) * self._block_tokens
            or event.group_idx not in _GROUPS
            or event.medium not in _MEDIA
            or event.lora_id is not None
            or event.lora_name is not None
        ):
            return
        extra = event.extra_keys or [None] * len(hashes)
        if event.parent_block_hash is None:
            seed, parent, plain = _seed_of(extra), None, 1
        else:
            before = self._cached.get(event.parent_block_hash)
            seed, parent, plain = (None, None, 0) if before is None else (before.seed, before.key, 0)
        if seed is None or len(extra) != len(hashes) or any(keys is not None for keys in extra[plain:]):
            return
        keys = chain_keys(seed, np.array(tokens, np.int32), self._block_tokens, parent=parent)
        for name, key in zip(hashes, keys, strict=True):
            self._add(name, seed, key.tobytes())

    def _add(self, name: Any, seed: bytes, key: bytes) -> None:
        known = self._cached.get(name)
        if known is None:
            self._cached[name] = _Cached(seed, key)
            self._on_stored(key)
        elif known.key == key:
            known.copies += 1
        else:
            log.error("vLLM has two blocks under one hash: neither is reported")
            del self._cached[name]
            self._on_removed(known.key)

    def _remove(self, hashes: Sequence[Any]) -> None:
        for name in hashes:
            known = self._cached.get(name)
            if known is None:
                continue
            known.copies -= 1
            if not known.copies:
                del self._cached[name]
                self._on_removed(known.key)


def _seed_of(extra: Sequence[Any]) -> bytes | None:
    """Return the seed of a chain from what vLLM hashed with its first block: the salt alone. None for anything else."""
    if not extra or extra[0] is None or len(extra[0]) != 1 or not isinstance(extra[0][0], str):
        return None
    try:
        seed = bytes.fromhex(extra[0][0])
    except ValueError:
        return None
    return seed if len(seed) == KEY_NBYTES else None
