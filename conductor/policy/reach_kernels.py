"""The compiled first half of a plan, in one go: what is placed, what pool nodes hold, who goes first, Algorithm 1.

Its parts stand in `kernels` and `line_kernels`; together they save what three more calls would take. Only computes.
"""

import functools
from typing import Any, NamedTuple

import numba
from numba import types

from conductor.policy.compiling import decision_kernel
from conductor.policy.kernels import prefixes, score_prefill
from conductor.policy.line_kernels import line_up

__all__ = ["ReachKernels", "reach_kernels"]

_prefixes: Any = numba.njit(prefixes)
_line_up: Any = numba.njit(line_up)
_score_prefill: Any = numba.njit(score_prefill)


def reach(
    table: Any,
    turns: Any,
    rows: Any,
    me: Any,
    clock_ns: Any,
    started_ns: Any,
    finish_ns: Any,
    blocks: Any,
    ssd_blocks: Any,
    match_slots: Any,
    limit: Any,
    sends: Any,
    slots: Any,
    pool_slots: Any,
    prompt_tokens: Any,
    block_tokens: Any,
    block_nbytes: Any,
    threshold: Any,
    slowdown: Any,
    prefill: Any,
    prefill_most: Any,
    load: Any,
    fetch: Any,
    ssd_read: Any,
    sums: Any,
    room: Any,
    own: Any,
    queue_s: Any,
    seconds: Any,
    reuse: Any,
    fetches: Any,
) -> Any:
    """`line_up`, `prefixes` and `score_prefill`, one after the other, with their arguments and results."""
    clock_ns, ticket_ns = _line_up(table, turns, rows, slots, me, clock_ns, started_ns, finish_ns, sums, room, queue_s)
    best, have, on_ssd, num_sends = _prefixes(blocks, ssd_blocks, match_slots, limit, sends, sums, pool_slots, own)
    chosen, ttft_s = _score_prefill(
        own,
        queue_s,
        have,
        on_ssd,
        num_sends,
        prompt_tokens,
        block_tokens,
        block_nbytes,
        threshold,
        slots,
        slowdown,
        prefill,
        prefill_most,
        load,
        fetch,
        ssd_read,
        seconds,
        reuse,
        fetches,
    )
    return clock_ns, ticket_ns, best, have, on_ssd, num_sends, chosen, ttft_s


class ReachKernels(NamedTuple):
    """See the function of the same name."""

    reach: Any


@functools.cache
def reach_kernels() -> ReachKernels:
    """Compiled or loaded at the first call."""
    signatures: Any = types
    n, f, flags = types.int64, types.float64, types.Array(types.bool_, 1, "C")
    ints, wide = types.Array(n, 1, "C"), types.Array(n, 2, "C")
    floats, reals = types.Array(f, 1, "C"), types.Array(f, 2, "C")
    two, three, seven = signatures.UniTuple(f, 2), signatures.UniTuple(f, 3), signatures.UniTuple(n, 7)
    lines = wide, wide, n, seven, n, n, n
    matches = ints, ints, ints, n, ints, ints, ints
    costs = n, n, n, f, reals, three, two, two, two, two
    room = wide, wide, wide, floats, reals, ints, flags
    found = signatures.Tuple((n, n, n, n, n, n, n, f))
    return ReachKernels(decision_kernel(reach, found(*lines, *matches, *costs, *room)))
