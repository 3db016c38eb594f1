"""What the pool's tests share: specs, the digest's reference in plain Python integers, chains."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool import KvGroup, KvSpec, chain_keys, chain_seed

MASK = (1 << 64) - 1


def two_group_spec(block_tokens: int = 4) -> KvSpec:
    full = KvGroup("full", 0, (0, 2), kv_heads=2, head_dim=4, dtype="float32")
    window = KvGroup("window", 6, (1, 3, 4), kv_heads=1, head_dim=6, dtype="float16")
    return KvSpec((full, window), block_tokens)


def reference_digests(slot: bytes, spec: KvSpec, g: int, start: int, stop: int) -> list[int]:
    """The definition in kvpool.digest, word by word, on Python integers."""
    row_nbytes, heads = spec.token_row_nbytes(g), spec.groups[g].kv_heads
    row_words = -(-row_nbytes // 4)
    digests = []
    for layer in range(spec.num_layers(g)):
        total = 0
        for h in range(heads):
            for p in range(2):
                for t in range(start, stop):
                    at = layer * spec.layer_nbytes(g) + ((h * 2 + p) * spec.block_tokens + t) * row_nbytes
                    row = slot[at : at + row_nbytes].ljust(row_words * 4, b"\0")
                    for w in range(row_words):
                        word = int.from_bytes(row[4 * w : 4 * w + 4], "little")
                        index = ((h * 2 + p) * spec.block_tokens + t) * row_words + w
                        x = ((index << 32 | word) + 0x9E3779B97F4A7C15) & MASK
                        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
                        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
                        total += x ^ x >> 31
        digests.append(total & MASK)
    return digests


def make_chain(num_blocks: int, salt: str = "", block_tokens: int = 4) -> NDArray[np.uint8]:
    ids = np.arange(num_blocks * block_tokens, dtype=np.int32)
    return chain_keys(chain_seed(salt, "tokenizer", block_tokens), ids, block_tokens)


@pytest.fixture(scope="session")
def spec() -> KvSpec:
    """Two groups, one of them windowed, with rows that are and rows that are not a multiple of 4 bytes long."""
    return two_group_spec()


@pytest.fixture(scope="session")
def chain_of() -> Callable[..., NDArray[np.uint8]]:
    return make_chain


@pytest.fixture(scope="session")
def digest_reference() -> Callable[[bytes, KvSpec, int, int, int], list[int]]:
    return reference_digests
