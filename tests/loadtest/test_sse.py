"""The event stream parser."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.errors import MalformedStream
from loadtest.http import EventStream


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), min_size=1), max_size=5),
    st.lists(st.integers(1, 9), min_size=1, max_size=30),
    st.sampled_from(["\n", "\r\n"]),
)
def test_events_come_out_whole_however_the_bytes_are_cut(texts: list[str], cuts: list[int], end: str) -> None:
    data = "".join(f"event: x{end}data: {text}{end}{end}: a comment{end}{end}" for text in texts).encode()
    stream, found, at = EventStream(), [], 0
    while at < len(data):
        step = cuts[at % len(cuts)]
        found += stream.feed(data[at : at + step])
        at += step
    assert found == texts


def test_several_data_lines_are_one_event() -> None:
    assert EventStream().feed(b"data: a\ndata:b\n\n") == ["a\nb"]


def test_an_endless_event_is_refused() -> None:
    stream = EventStream()
    for _ in range(8):
        assert stream.feed(b"x" * (1 << 20)) == []
    with pytest.raises(MalformedStream, match="more than"):
        stream.feed(b"x")
