"""Chain keys of vLLM's cached blocks, from its KV events: exactly the right ones, or none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool.address import chain_keys, chain_seed
from vllm_worker.engine_blocks import EngineBlocks

BLOCK = 4
SEED = chain_seed("tenant", "tokenizer", BLOCK)


@dataclass
class BlockStored:
    """Fields of vLLM's event of this name."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int = BLOCK
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = 0


@dataclass
class BlockRemoved:
    block_hashes: list[bytes]
    medium: str | None = "GPU"
    group_idx: int | None = 0


@dataclass
class AllBlocksCleared:
    pass


def name(seed: bytes, tokens: tuple[int, ...]) -> bytes:
    """A hash as vLLM makes it: of the salt and all tokens up to the block's end."""
    return seed + bytes(tokens)


def keys_of(seed: bytes, tokens: tuple[int, ...]) -> list[bytes]:
    return [key.tobytes() for key in chain_keys(seed, np.array(tokens, np.int32), BLOCK)]


def stored(seed: bytes, tokens: tuple[int, ...], first: int, end: int, **fields: Any) -> BlockStored:
    """The event for blocks [first, end) of a prompt."""
    hashes = [name(seed, tokens[: (i + 1) * BLOCK]) for i in range(end)]
    extra: list[tuple[Any, ...] | None] = [(seed.hex(),) if i == 0 else None for i in range(first, end)]
    event = BlockStored(
        hashes[first:],
        hashes[first - 1] if first else None,
        list(tokens[first * BLOCK : end * BLOCK]),
        extra_keys=extra if any(extra) else None,
    )
    for field, value in fields.items():
        setattr(event, field, value)
    return event


class Held:
    """Keys that the callbacks have reported."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.blocks = EngineBlocks(BLOCK, self.add, self.discard)

    def add(self, key: bytes) -> None:
        assert key not in self.keys
        self.keys.add(key)

    def discard(self, key: bytes) -> None:
        self.keys.remove(key)


TOKENS = tuple(range(1, 13))


def test_keys_are_those_of_the_chain_also_where_an_answer_continues_it() -> None:
    held = Held()
    held.blocks.apply(stored(SEED, TOKENS, 0, 2))
    held.blocks.apply(stored(SEED, TOKENS, 2, 3))
    assert held.keys == set(keys_of(SEED, TOKENS))


def test_a_block_that_vllm_has_twice_is_gone_with_the_last_copy() -> None:
    held = Held()
    for _ in range(2):
        held.blocks.apply(stored(SEED, TOKENS, 0, 3))
    held.blocks.apply(BlockRemoved([name(SEED, TOKENS)]))
    assert len(held.keys) == 3
    held.blocks.apply(BlockRemoved([name(SEED, TOKENS)]))
    assert held.keys == set(keys_of(SEED, TOKENS)[:2])
    held.blocks.apply(AllBlocksCleared())
    assert held.keys == set()
    assert len(held.blocks) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_keys": None},
        {"extra_keys": [(SEED.hex(), "adapter"), None, None]},
        {"extra_keys": [("image", 0), None, None]},
        {"extra_keys": [("not hexadecimal",), None, None]},
        {"extra_keys": [(SEED.hex()[:-2],), None, None]},
        {"extra_keys": [(SEED.hex(),), ("image",), None]},
        {"extra_keys": [(SEED.hex(),)]},
        {"parent_block_hash": b"unknown"},
        {"block_size": 2 * BLOCK},
        {"token_ids": list(TOKENS[:-1])},
        {"group_idx": 1},
        {"medium": "CPU"},
        {"lora_id": 1},
        {"lora_name": "adapter"},
    ],
)
def test_a_block_whose_chain_is_not_certain_is_left_out_and_what_follows_it_too(fields: dict[str, Any]) -> None:
    held = Held()
    held.blocks.apply(stored(SEED, TOKENS, 0, 3, **fields))
    longer = (*TOKENS, 1, 2, 3, 4)
    held.blocks.apply(stored(SEED, longer, 3, 4))
    assert held.keys == set()
    held.blocks.apply(BlockRemoved([name(SEED, TOKENS)]))
    assert held.keys == set()


def test_two_blocks_under_one_hash_are_both_left_out(caplog: pytest.LogCaptureFixture) -> None:
    held = Held()
    held.blocks.apply(stored(SEED, TOKENS, 0, 1))
    other = stored(SEED, TOKENS[4:], 0, 1, block_hashes=[name(SEED, TOKENS[:4])])
    held.blocks.apply(other)
    assert held.keys == set()
    assert "two blocks under one hash" in caplog.text


class EngineBlocksMachine(RuleBasedStateMachine):
    """Any order of events of a cache: reported are always right keys of blocks that are there."""

    prompts = st.tuples(
        st.sampled_from([SEED, chain_seed("other", "tokenizer", BLOCK)]),
        st.lists(st.sampled_from([(1,) * BLOCK, (2,) * BLOCK]), min_size=1, max_size=4).map(lambda b: sum(b, ())),
    )

    def __init__(self) -> None:
        super().__init__()
        self.held = Held()
        self.copies: dict[bytes, int] = {}
        self.keys: dict[bytes, bytes] = {}

    @rule(prompt=prompts, first=st.integers(0, 3))
    def store(self, prompt: tuple[bytes, tuple[int, ...]], first: int) -> None:
        seed, tokens = prompt
        count = len(tokens) // BLOCK
        first = min(first, count - 1)
        self.held.blocks.apply(stored(seed, tokens, first, count))
        for i in range(first, count):
            hashed = name(seed, tokens[: (i + 1) * BLOCK])
            self.copies[hashed] = self.copies.get(hashed, 0) + 1
            self.keys[hashed] = keys_of(seed, tokens)[i]

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        there = sorted(hashed for hashed, count in self.copies.items() if count)
        if there:
            hashed = data.draw(st.sampled_from(there))
            self.copies[hashed] -= 1
            self.held.blocks.apply(BlockRemoved([hashed]))

    @rule()
    def clear(self) -> None:
        self.copies.clear()
        self.held.blocks.apply(AllBlocksCleared())

    @rule()
    def lose(self) -> None:
        self.held.blocks.clear()
        assert self.held.keys == set()

    @invariant()
    def reported_blocks_are_there(self) -> None:
        assert self.held.keys <= {self.keys[hashed] for hashed, count in self.copies.items() if count}


TestEngineBlocks = EngineBlocksMachine.TestCase
TestEngineBlocks.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
