"""Ids of prompts that are given as pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from traces.prompt_blocks import FreshIds, PromptBlocks

PIECES = st.lists(st.tuples(st.sampled_from([b"a", b"b"]), st.integers(0, 12)), max_size=6)


def blocks_of(pieces: list[tuple[bytes, int]], size: int) -> PromptBlocks:
    made = PromptBlocks(size)
    for name, num_tokens in pieces:
        made.append(name, num_tokens)
    return made


@given(PIECES, PIECES, st.integers(1, 9))
def test_ids_are_equal_exactly_where_the_pieces_before_are(
    one: list[tuple[bytes, int]], two: list[tuple[bytes, int]], size: int
) -> None:
    tokens = [[(name, i) for name, count in pieces for i in range(count)] for pieces in (one, two)]
    ids = [blocks_of(pieces, size).ids() for pieces in (one, two)]
    for each, prompt in zip(ids, tokens, strict=True):
        assert len(each) == len(set(each)) == -(-len(prompt) // size)
        assert all(0 <= block_id < 1 << 63 for block_id in each)
    for position, (a, b) in enumerate(zip(*ids, strict=False)):
        end = (position + 1) * size
        assert (a == b) == (tokens[0][:end] == tokens[1][:end])


@given(st.lists(st.integers(0, 99), max_size=40), st.integers(0, 40), st.integers(1, 9))
def test_it_does_not_matter_how_token_ids_are_divided(ids: list[int], cut: int, size: int) -> None:
    whole, parts = PromptBlocks(size), PromptBlocks(size)
    whole.append_tokens(ids)
    parts.append_tokens(ids[:cut])
    copied = parts.copy()
    parts.append_tokens(ids[cut:])
    assert whole.ids() == parts.ids()
    assert whole.num_tokens == len(ids)
    assert copied.num_tokens == len(ids[:cut])


@given(st.lists(st.integers(1, 40), max_size=10), st.integers(1, 9))
def test_fresh_ids_are_never_repeated(lengths: list[int], size: int) -> None:
    fresh = FreshIds(size)
    taken = [fresh.take(length) for length in lengths]
    assert [len(ids) for ids in taken] == [-(-length // size) for length in lengths]
    assert len({each for ids in taken for each in ids}) == sum(map(len, taken))
