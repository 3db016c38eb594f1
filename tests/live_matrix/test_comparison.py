"""The live matrix finds every difference between two answers, and shows a cell's worst outcome."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from tests.live_matrix.requests import Kind
from tests.live_matrix.runs import record, worst
from tests.live_matrix.streams import Answer, Choice


def answer() -> Answer:
    choice = Choice([1, 2, 3], "abc", [["note", "{}"]], ["a", "b", "c"], [-0.1, -0.1, -2.0, -0.3, -0.3, -1.0], "stop")
    return Answer({0: choice, 1: copy.deepcopy(choice)})


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda other: other.choices[1].token_ids.__setitem__(2, 4), "choice 1: token_ids[2] is 4, expected 3"),
        (lambda other: other.choices[0].token_ids.pop(), "choice 0: 2 token_ids, expected 3"),
        (lambda other: other.choices[0].logprob_tokens.append("d"), "choice 0: 4 logprob_tokens, expected 3"),
        (
            lambda other: other.choices[0].logprobs.__setitem__(1, -0.11),
            "choice 0: logprobs[1] is -0.11, expected -0.1",
        ),
        (lambda other: setattr(other.choices[0], "text", "abd"), "choice 0: text is 'abd', expected 'abc'"),
        (
            lambda other: setattr(other.choices[0], "finish_reason", ""),
            "choice 0: finish_reason is '', expected 'stop'",
        ),
        (lambda other: other.choices[0].calls.clear(), "choice 0: calls is"),
        (lambda other: other.choices.pop(1), "choices [0], expected [0, 1]"),
        (lambda other: setattr(other, "error", "no_nodes"), "error 'no_nodes', expected ''"),
    ],
)
def test_a_difference_is_found(change: Callable[[Answer], object], found: str) -> None:
    other = answer()
    change(other)
    assert answer().difference(other).startswith(found)


def test_log_probabilities_may_differ_by_a_rounding_only() -> None:
    other = answer()
    other.choices[0].logprobs[1] -= 1e-5
    assert answer().difference(other) == ""


def test_a_cell_shows_its_worst_outcome() -> None:
    assert worst(["", "equal", "equal, resumed", "equal"]) == "equal, resumed"
    assert worst(["equal, resumed", "LOST: greedy"]) == "LOST: greedy"


def test_a_defect_is_recorded_and_fails() -> None:
    recorded = dict[str, object]()
    cells = {Kind.GREEDY: "equal", Kind.SEEDED: "WRONG: seeded"}
    with pytest.raises(AssertionError, match="WRONG: seeded"):
        record(cells, "native", "hang", recorded.__setitem__)
    assert recorded == {
        "live matrix: native: hang: greedy": "equal",
        "live matrix: native: hang: seeded": "WRONG: seeded",
    }
