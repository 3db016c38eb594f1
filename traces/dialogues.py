"""Dialogues in a trace: which earlier request is the previous turn of a request. Pure."""

from traces.row import Trace, TraceRow

_LEAST_BLOCKS = 2  # shared by a request and its previous turn: all requests share the system prompt's block


def previous_turns(trace: Trace) -> dict[int, TraceRow]:
    """Return the previous turn of each row that has one, by the row's index.

    That is the latest row whose prompt, in full blocks, is the longest that the row's prompt begins with. A prompt of
    fewer than two full blocks cannot be recognised.
    """
    latest: dict[int, TraceRow] = {}  # by the last full block of its prompt
    found: dict[int, TraceRow] = {}
    for row in trace:
        blocks = row.hash_ids[: row.full_blocks(trace.block_tokens)]
        for block in reversed(blocks[_LEAST_BLOCKS - 1 :]):
            if (turn := latest.get(block)) is not None:
                found[row.index] = turn
                break
        if len(blocks) >= _LEAST_BLOCKS:
            latest[blocks[-1]] = row
    return found
