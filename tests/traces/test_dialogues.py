"""Dialogues in traces: which row is the previous turn of which."""

from traces import Trace, TraceRow, load_trace, previous_turns


def rows(*found):
    """A trace of (prompt tokens, block ids) with blocks of ten tokens."""
    return Trace("t", tuple(TraceRow(i, i, tokens, 1, ids) for i, (tokens, ids) in enumerate(found)), 10)


def pairs(trace):
    return {row: turn.index for row, turn in previous_turns(trace).items()}


def test_a_turn_continues_the_longest_prompt_that_it_begins_with():
    trace = rows((25, (0, 1, 2)), (38, (0, 1, 3, 4)), (45, (0, 1, 3, 5, 6)), (58, (0, 1, 3, 5, 7, 8)))
    assert pairs(trace) == {1: 0, 2: 1, 3: 2}


def test_of_two_turns_with_the_same_full_blocks_the_later_one_counts():
    assert pairs(rows((25, (0, 1, 2)), (28, (0, 1, 3)), (38, (0, 1, 4, 5)))) == {1: 0, 2: 1}


def test_the_system_prompt_alone_makes_no_dialogue():
    assert pairs(rows((15, (0, 1)), (28, (0, 2, 3)), (38, (0, 4, 5, 6)))) == {}


def test_a_third_of_the_conversation_trace_are_later_turns():
    trace = load_trace("conversation")
    assert 0.32 < len(previous_turns(trace)) / len(trace) < 0.34
