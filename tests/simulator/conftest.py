"""Traces for the simulator: the bundled one, and small ones of any shape."""

from collections.abc import Callable, Sequence

import pytest

from simulator.cache import ChainedTrace, chained
from traces import Trace, TraceRow, load_trace


@pytest.fixture(scope="session")
def conversation() -> ChainedTrace:
    return chained(load_trace("conversation"))


@pytest.fixture(scope="session")
def small_trace() -> Callable[[Sequence[Sequence[int]]], ChainedTrace]:
    """A trace of these prompts, one a second, given as the ids of whole blocks."""

    def build(prompts: Sequence[Sequence[int]]) -> ChainedTrace:
        rows = tuple(
            TraceRow(index, index * 1000, 512 * len(ids), 1, tuple(ids)) for index, ids in enumerate(prompts) if ids
        )
        return chained(Trace("small", rows))

    return build
