"""The search for the largest rate that meets the objectives: its policy, the judgement of a step, and a live search."""

from __future__ import annotations

import json
import math
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from loadtest.bench.cli import app
from loadtest.capacity import CapacityFinding, CapacityObjective, CapacitySearch, StepVerdict, judge_step
from loadtest.capacity.page import capacity_page, headline
from loadtest.capacity.runner import CapacityResult
from loadtest.errors import SettingInvalid
from loadtest.record import RequestRecord, SendOutcome
from tests.chromium import look_at

RESOLUTIONS = st.sampled_from([0.02, 0.1, 0.3, 1.0])


def run(search: CapacitySearch, judge: Any, at_most: int = 5000) -> int:
    """Steps until the search is over."""
    for step in range(at_most):
        rate = search.next_rate()
        search.validate()
        if rate is None:
            return step
        assert search.least * 0.999 <= rate <= search.most * 1.001
        search.record(judge(rate))
    raise AssertionError("the search does not end")


@given(st.floats(0.02, 900.0), st.floats(0.05, 500.0), RESOLUTIONS)
def test_a_sharp_threshold_is_found_to_the_resolution(threshold: float, start: float, resolution: float) -> None:
    search = CapacitySearch(start, resolution, least=0.01, most=1e4)
    steps = run(search, lambda rate: StepVerdict.PASS if rate <= threshold else StepVerdict.FAIL)
    found = search.finding
    assert found.bounded
    assert found.rate is not None
    assert found.rate <= threshold < found.rate * (1 + resolution) * (1 + 1e-9)
    # Doubling to the threshold, halving what a doubling spans, and once more on each side of the border.
    doublings = abs(math.log2(threshold / start)) * 1.2 + 2
    assert steps <= doublings + math.log2(math.log(2) / math.log1p(resolution) + 1) + 4


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.floats(0.0, 1.0), st.floats(0.0, 0.3), RESOLUTIONS)
def test_whatever_the_verdicts_the_search_ends_with_what_it_confirmed(
    seed: int, noise: float, invalid: float, resolution: float
) -> None:
    rng = random.Random(seed)
    trials: dict[float, list[StepVerdict]] = {}

    def judge(rate: float) -> StepVerdict:
        fails = rate > 10.0 if rng.random() > noise else rng.random() < 0.5
        verdict = StepVerdict.INVALID if rng.random() < invalid else StepVerdict.FAIL if fails else StepVerdict.PASS
        trials.setdefault(rate, []).append(verdict)
        return verdict

    search = CapacitySearch(1.0, resolution, least=0.1, most=100.0)
    run(search, judge)
    finding = search.finding
    if finding.rate is not None:
        assert trials[finding.rate].count(StepVerdict.PASS) == 2
    if finding.bounded:
        beyond = min(trials) if finding.rate is None else min(rate for rate in trials if rate > finding.rate)
        assert trials[beyond].count(StepVerdict.FAIL) == 2
        assert finding.rate is None or beyond == pytest.approx(finding.rate * (1 + resolution))


@pytest.mark.parametrize("unlucky", ["the passing side", "the failing side", "the first step"])
def test_one_wrong_verdict_is_outvoted(unlucky: str) -> None:
    exact = CapacitySearch(1.0, 0.1)
    run(exact, lambda rate: StepVerdict.PASS if rate <= 10 else StepVerdict.FAIL)
    border = exact.finding.rate
    assert border is not None
    wrong_at = {"the passing side": border, "the failing side": border * 1.1, "the first step": 1.0}[unlucky]
    seen = 0

    def judge(rate: float) -> StepVerdict:
        nonlocal seen
        here = rate == pytest.approx(wrong_at)
        seen += here
        return StepVerdict.PASS if (rate <= 10) is not (here and seen == 1) else StepVerdict.FAIL

    noisy = CapacitySearch(1.0, 0.1)
    run(noisy, judge)
    assert noisy.finding.bounded
    assert noisy.finding.rate == pytest.approx(border)


def test_the_ends_of_the_range_are_said_to_be_no_border() -> None:
    search = CapacitySearch(1.0, 0.1, most=50.0)
    run(search, lambda rate: StepVerdict.PASS)
    assert search.finding.rate == pytest.approx(50.0, rel=0.1)
    assert not search.finding.bounded
    search = CapacitySearch(1.0, 0.1, least=0.2)
    run(search, lambda rate: StepVerdict.FAIL)
    assert search.finding == CapacityFinding(None, True, False)


def test_a_sender_that_cannot_keep_up_bounds_the_search_and_says_so() -> None:
    search = CapacitySearch(1.0, 0.1)
    run(search, lambda rate: StepVerdict.INVALID if rate > 30 else StepVerdict.PASS)
    assert search.finding.rate == pytest.approx(30, rel=0.1)
    assert search.finding.sender_limited
    search = CapacitySearch(1.0, 0.1)
    run(search, lambda rate: StepVerdict.INVALID if rate > 30 else StepVerdict.PASS if rate < 5 else StepVerdict.FAIL)
    assert not search.finding.sender_limited
    search = CapacitySearch(1.0, 0.1)
    run(search, lambda rate: StepVerdict.INVALID)
    assert search.finding == CapacityFinding(None, False, True)


@pytest.mark.parametrize("values", [(0.0, 0.1), (1.0, 0.0), (1.0, math.nan), (2e6, 0.1), (math.nan, 0.1)])
def test_a_range_with_nothing_in_it_is_refused(values: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="cannot search"):
        CapacitySearch(*values)
    search = CapacitySearch(1.0, 0.1, most=1.0)
    run(search, lambda rate: StepVerdict.PASS)
    with pytest.raises(ValueError, match="over"):
        search.record(StepVerdict.PASS)


def record_of(index: int, ttft: float, outcome: SendOutcome = SendOutcome.COMPLETED) -> RequestRecord:
    record = RequestRecord(index, 0.1 * index, 10, 2, 0.0, 0, outcome=outcome)
    record.sent_s, record.output_tokens = record.due_s, 2
    record.event_times = [record.sent_s + ttft, record.sent_s + ttft + 0.01]
    return record


OBJECTIVE = CapacityObjective({"ttft": 100.0, "tpot": 50.0})


def test_a_step_passes_when_the_percentile_keeps_its_bounds() -> None:
    # The slow ones at the beginning met an empty server's first requests and are not judged.
    slow_start = [record_of(i, 0.5 if i < 20 else 0.05) for i in range(100)]
    step = judge_step(10.0, slow_start, OBJECTIVE, [])
    assert (step.verdict, step.judged, step.attainment) == (StepVerdict.PASS, 80, 1.0)
    assert step.latency_ms == {"ttft": pytest.approx(50), "tpot": pytest.approx(10)}
    assert step.goodput_rps == pytest.approx(10.0)
    few = judge_step(10.0, [record_of(i, 0.5 if i % 12 == 0 else 0.05) for i in range(100)], OBJECTIVE, [])
    assert few.verdict is StepVerdict.PASS
    assert 0.9 < few.attainment < 1


def test_a_step_fails_by_name_of_what_was_missed() -> None:
    step = judge_step(10.0, [record_of(i, 0.5 if i % 5 == 0 else 0.05) for i in range(100)], OBJECTIVE, [])
    assert (step.verdict, step.reasons) == (StepVerdict.FAIL, ("p90 TTFT 500 ms > 100 ms",))
    rejected = [record_of(i, 0.05, SendOutcome.REJECTED if i % 20 == 0 else SendOutcome.COMPLETED) for i in range(100)]
    assert judge_step(10.0, rejected, OBJECTIVE, []).reasons == ("5.0% rejected or failed",)
    assert judge_step(10.0, [], OBJECTIVE, []).verdict is StepVerdict.FAIL


def test_an_invalid_step_is_no_verdict_on_the_server() -> None:
    step = judge_step(10.0, [record_of(i, 0.5) for i in range(100)], OBJECTIVE, ["the sender lagged"])
    assert step.verdict is StepVerdict.INVALID
    assert step.reasons[0] == "the sender lagged"


def test_a_step_is_long_enough_in_time_and_in_requests() -> None:
    objective = CapacityObjective({"ttft": 1.0}, step_s=30.0)
    assert [objective.requests_at(rate) for rate in (0.1, 1.0, 10.0, 10.01)] == [50, 50, 300, 301]


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"bounds_ms": {}}, "--goodput"),
        ({"percentile": 0.0}, "--capacity-percentile"),
        ({"max_lost_share": 1.0}, "--capacity-max-lost"),
        ({"step_s": 0.0}, "--capacity-step"),
    ],
)
def test_objectives_out_of_range_are_named(values: dict[str, Any], flag: str) -> None:
    with pytest.raises(SettingInvalid, match=flag):
        CapacityObjective(**({"bounds_ms": {"ttft": 1.0}} | values))


def oracle(threshold: float, step_s: float, start: float):
    """A server that rejects every request of a step above the threshold: it follows the search to know which it is."""
    search, objective = CapacitySearch(start, 0.5, most=10_000.0), CapacityObjective({"ttft": 1.0}, step_s=step_s)
    left, rate = 0, 0.0

    async def behave(server: Any, request: Any, body: Any) -> web.Response | None:
        nonlocal left, rate
        if left == 0:
            if rate:
                search.record(StepVerdict.FAIL if rate > threshold else StepVerdict.PASS)
            rate = search.next_rate() or math.inf
            left = objective.requests_at(rate) if math.isfinite(rate) else 1 << 60
        left -= 1
        if rate > threshold:
            return web.json_response({"error": {"message": "full"}}, status=429)
        return None

    return behave


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.svgs, self.ids = 0, list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.svgs += tag == "svg"
        self.ids += [value or "" for name, value in attrs if name == "id"]


def search_command(server: Any, folder: Path, *arguments: Any) -> Any:
    flags = (
        *("--base-url", server.url, "--find-capacity", "--goodput", "ttft:60000", "--result-dir", folder),
        *("--capacity-start", 100, "--capacity-step", 0.01, "--capacity-resolution", 0.5, "--max-send-lag", 60),
        *("--input-len", 8, "--output-len", 2),
    )
    return CliRunner().invoke(app, ["serve", *map(str, (*flags, *arguments))])


def test_a_live_search_prints_its_steps_and_ends_with_the_answer(serve, tmp_path: Path) -> None:
    server = serve(behave=oracle(350.0, 0.01, 100.0))
    done = search_command(server, tmp_path)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.output.splitlines()[-1])
    # On the grid 100 · 1.5^k: 337.5 is the last one within, 506 the first beyond.
    assert answer["capacity_rps"] == pytest.approx(337.5)
    assert (answer["valid"], answer["bounded"], answer["objectives_ms"]) == (True, True, {"ttft": 60000.0})
    assert answer == json.loads((tmp_path / "capacity.json").read_text())
    tried = [(round(step["rate"], 1), step["verdict"]) for step in answer["steps"]]
    assert sorted(tried)[-4:] == [(337.5, "pass"), (337.5, "pass"), (506.2, "fail"), (506.2, "fail")]
    assert done.output.count("step ") >= len(tried)
    assert "506 requests/s MISSED" in done.output
    assert "Capacity: 338 requests/s" in done.output
    page = _Page()
    page.feed((tmp_path / "capacity.html").read_text())
    assert page.svgs == 2
    look_at(tmp_path / "capacity.html")
    assert len(page.ids) == len(set(page.ids))
    # No prompt is sent twice: nothing of one step is in the server's cache at the next.
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == len(prompts)


def test_a_search_bounded_by_its_sender_is_invalid_everywhere(serve, tmp_path: Path) -> None:
    done = search_command(serve(), tmp_path, "--max-send-lag", 1e-9, "--capacity-min-rate", 100)
    assert done.exit_code == 3
    assert json.loads(done.output.splitlines()[-1])["valid"] is False
    assert "INVALID Capacity: none" in done.output
    assert 'class="invalid"' in (tmp_path / "capacity.html").read_text()


@pytest.mark.parametrize("arguments", [("--capacity-min-rate", 200), ("--capacity-resolution", 0)])
def test_a_search_without_a_range_is_refused(serve, tmp_path: Path, arguments: tuple[Any, ...]) -> None:
    done = search_command(serve(), tmp_path, *arguments)
    assert done.exit_code == 2
    assert "expected --capacity-min-rate ≤ --capacity-start" in done.stderr


@pytest.mark.parametrize(
    ("finding", "said"),
    [
        (CapacityFinding(8.0, True, False), "Capacity: 8 requests/s"),
        (CapacityFinding(8.0, False, False), "Capacity: at least 8 requests/s"),
        (CapacityFinding(8.0, False, True), "INVALID Capacity: at least 8 requests/s"),
        (CapacityFinding(None, True, False), "Capacity: none: the lowest rate missed the objectives"),
        (CapacityFinding(None, False, True), "INVALID Capacity: none: no rate could be sent"),
    ],
)
def test_the_headline_says_what_the_answer_is_worth(finding: CapacityFinding, said: str) -> None:
    result = CapacityResult("m", finding, [], OBJECTIVE, False, [])
    assert headline(result) == said
    assert f"<h1>{said}</h1>" in capacity_page(result)


@pytest.mark.parametrize("flags", [("--request-rate", 4), ("--save-detailed",)])
def test_a_flag_of_a_single_load_is_refused_rather_than_ignored(serve, tmp_path: Path, flags: tuple[Any, ...]) -> None:
    done = search_command(serve(), tmp_path, *flags)
    assert (done.exit_code, done.stderr.startswith(f"error: {flags[0]} ")) == (2, True)
