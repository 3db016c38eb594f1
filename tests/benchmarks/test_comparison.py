"""When two figures agree, and what the table says of them."""

import math

import pytest

from benchmarks.clients.comparison import Allowed, ClientCheck, Comparison, markdown, summary


def compared(theirs: float | None, ours: float | None, **allowed: float) -> Comparison:
    return Comparison("aiperf", "TTFT", theirs, ours, "/metrics", "ms", Allowed(**allowed))


@pytest.mark.parametrize(
    ("theirs", "ours", "allowed", "agrees"),
    [
        (40.0, 40.0, {}, True),
        (40.0, 41.0, {}, False),
        (110.0, 100.0, {"share": 0.1}, True),
        (111.0, 100.0, {"share": 0.1}, False),
        (89.0, 100.0, {"share": 0.1}, False),
        (0.5, 0.0, {"slack": 1.0}, True),
        (115.0, 100.0, {"share": 0.1, "slack": 5.0}, True),
        (None, 0.0, {"slack": 1e9}, False),
        (0.0, None, {"slack": 1e9}, False),
        (math.nan, math.nan, {"slack": 1e9}, False),
    ],
)
def test_figures_agree_within_what_is_allowed(
    theirs: float | None, ours: float | None, allowed: dict[str, float], agrees: bool
) -> None:
    assert compared(theirs, ours, **allowed).agrees is agrees


def test_the_table_names_every_row_with_its_verdict() -> None:
    rows = [
        compared(10.0, 20.0),
        ClientCheck("openai", "chat", True, "a | b"),
        ClientCheck("guidellm", "run", False, "why"),
    ]
    lines = markdown(rows).splitlines()
    assert len(lines) == 2 + len(rows)
    assert lines[2].endswith("| 10 ms | 20 ms | /metrics | 0.500 | equal | DISAGREES |")
    assert "a \\| b" in lines[3]
    assert lines[3].endswith("| works |")
    assert lines[4].endswith("| FAILS |")
    assert summary(rows) == "1 of 3 agree or work; not: aiperf: TTFT, guidellm: run"
