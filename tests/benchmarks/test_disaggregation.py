"""The table of disaggregated against aggregated: medians, ranges, and who is called better."""

from pathlib import Path

import pytest

from benchmarks.disaggregation.measure import SHAPES, Run, figures_of, tpot_percentiles
from benchmarks.disaggregation.picture import draw
from benchmarks.disaggregation.tables import FIGURES, rows, values

FIRST, SECOND = SHAPES


def runs(name: str, mine: list[float | None], other: list[float | None]) -> list[Run]:
    blank: dict[str, float | None] = dict.fromkeys(FIGURES)
    return [
        Run(shape, 20.0, repeat, {**blank, name: figure}, 0.5, (), ())
        for shape, figures in ((FIRST, mine), (SECOND, other))
        for repeat, figure in enumerate(figures)
    ]


def row(name: str, mine: list[float | None], other: list[float | None]) -> tuple[str, ...]:
    place = list(FIGURES).index(name)
    return rows(runs(name, mine, other))[place]


def test_a_row_has_medians_ranges_and_their_ratio() -> None:
    assert row("ttft_p50_s", [0.03, 0.01, 0.02], [0.04, 0.05, 0.06])[:5] == (
        "20",
        "TTFT p50",
        "20 ms (10..30)",
        "50 ms (40..60)",
        "0.40",
    )


@pytest.mark.parametrize(
    ("name", "mine", "other", "better"),
    [
        ("ttft_p50_s", [1, 2], [3, 4], FIRST),
        ("ttft_p50_s", [3, 4], [1, 2], SECOND),
        ("goodput_rps", [3, 4], [1, 2], FIRST),
        ("goodput_rps", [1, 2], [3, 4], SECOND),
        ("goodput_rps", [1, 3], [2, 4], "no difference seen"),
        ("goodput_rps", [1.01, 1.01], [1.0, 1.0], "no difference seen"),
        ("goodput_rps", [1], [2], "–"),
        ("goodput_rps", [None, None], [2, 3], "–"),
        ("completed", [1, 1], [2, 2], "–"),
    ],
)
def test_better_is_only_who_is_so_in_every_repeat(
    name: str, mine: list[float | None], other: list[float | None], better: str
) -> None:
    assert row(name, mine, other)[-1] == better


def test_time_per_output_token_is_of_completed_requests_of_two_tokens_or_more() -> None:
    records = [
        {"outcome": "completed", "token_times_s": [1.0, 1.1, 1.4]},
        {"outcome": "completed", "token_times_s": [1.0]},
        {"outcome": "failed", "token_times_s": [1.0, 9.0]},
    ]
    assert tpot_percentiles(records, (50, 99)) == pytest.approx([0.2, 0.2])
    assert tpot_percentiles([], (50, 99)) == [None, None]


def test_figures_come_from_the_replays_report() -> None:
    spread = {"p50": 0.1, "p90": 0.2, "p99": 0.3}
    report = {
        **dict.fromkeys(("requests", "completed", "rejected", "failed"), 4),
        "ttft_s": spread,
        "tbt_s": spread,
        "send_lateness_s": spread,
        "output_tokens": 30,
        "duration_s": 10.0,
        "request_rps": 0.4,
        "goodput_rps": 0.3,
        "prefix_hit_rate": 0.5,
    }
    figures = figures_of(report, [])
    assert set(FIGURES) - set(figures) == {"cpu_s"}
    assert (figures["ttft_p99_s"], figures["output_tps"], figures["tpot_p50_s"]) == (0.3, 3.0, None)


def test_the_picture_shows_both_shapes(tmp_path: Path) -> None:
    drawn = runs("ttft_p50_s", [0.01, 0.02], [0.03, 0.04])
    assert values(drawn, SECOND, 20.0, "ttft_p50_s") == [0.03, 0.04]
    draw(drawn, tmp_path / "bars.svg")
    assert "<svg" in (tmp_path / "bars.svg").read_text()
