"""Assignment of the chunks of a prompt to the members of a prefill group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_node.chunk_assignment import assign_chunks


@given(st.integers(0, 40), st.integers(1, 3000), st.integers(1, 700), st.integers(1, 64), st.integers(1, 6))
def test_chunks_cover_the_rest_once_and_turn_about(
    first_block: int, new_tokens: int, chunk_tokens: int, block_tokens: int, members: int
) -> None:
    start = first_block * block_tokens
    end = start + new_tokens
    found = assign_chunks(start, end, chunk_tokens=chunk_tokens, block_tokens=block_tokens, members=members)
    assert len(found) == members
    owners = sorted((span, member) for member, spans in enumerate(found) for span in spans)
    assert [span[0] for span, _ in owners] == [start, *(span[1] for span, _ in owners[:-1])]
    assert owners[-1][0][1] == end
    assert all(span[0] % block_tokens == 0 and span[0] < span[1] for span, _ in owners)
    assert all(span[1] - span[0] <= max(chunk_tokens, block_tokens) for span, _ in owners)
    assert [member for _, member in reversed(owners)] == [i % members for i in range(len(owners))]


@pytest.mark.parametrize("members", [1, 2, 3, 4])
def test_members_of_a_long_prompt_get_equal_parts(members: int) -> None:
    found = assign_chunks(0, 100_000, chunk_tokens=2048, block_tokens=16, members=members)
    assert len({len(spans) for spans in found}) == 1
    sizes = [sum(end - start for start, end in spans) for spans in found]
    assert max(sizes) - min(sizes) < 2048


def test_the_head_has_the_last_chunk_of_a_prompt_too_short_for_all() -> None:
    assert assign_chunks(0, 40, chunk_tokens=32, block_tokens=8, members=3) == [[(32, 40)], [(16, 32)], [(0, 16)]]
    assert assign_chunks(8, 16, chunk_tokens=32, block_tokens=8, members=2) == [[(8, 16)], []]
