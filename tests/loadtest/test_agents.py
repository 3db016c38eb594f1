"""Agents: a closed loop whose contexts grow by the real answers, with hints, sessions and sub-agents."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from loadtest.agent_cli import app
from loadtest.agent_config import AgentRunConfig
from loadtest.agent_report import AgentReport, summarise_agents
from loadtest.agent_runner import run
from loadtest.errors import ServerUnusable, SettingInvalid
from traces.agents import AgentSettings, make_agents

BUNDLED_MODEL = Path(__file__).parents[2] / "moonpool" / "data" / "model"
SETTINGS = AgentSettings(
    agents=3,
    turns=5.0,
    prompt_to_output=12.0,
    output_tokens=6.0,
    system_tokens=24,
    task_tokens=8.0,
    subagent_share=0.4,
    subagent_turns=2.0,
    start_s=1.0,
    seed=3,
)

Lead = Callable[..., AgentReport]


@pytest.fixture
def lead(tmp_path: Path) -> Lead:
    """Runs three agents, of which some start sub-agents, without waits."""

    def start(url: str, **changes: Any) -> AgentReport:
        values: dict[str, Any] = {"agents": SETTINGS, "wait_scale": 0.0, "out": tmp_path / "out"}
        return run(AgentRunConfig(url=url, model_path=BUNDLED_MODEL, **(values | changes)))

    return start


def note(seen: list[tuple[str, str, dict[str, Any]]]) -> Any:
    async def behave(server: Any, request: web.Request, body: dict[str, Any]) -> None:
        headers = request.headers
        seen.append((headers["x-session-id"], headers.get("x-parent-session-id", ""), dict(body)))

    return behave


def test_a_turn_sends_the_whole_context_with_the_answers_of_the_server(serve, lead: Lead) -> None:
    seen: list[tuple[str, str, dict[str, Any]]] = []
    report = lead(serve(behave=note(seen)).url)
    assert report.ok
    agents = make_agents(SETTINGS)
    assert sum(1 for agent in agents for _ in agent.subagents()) >= 1
    planned = {each.number: each for agent in agents for each in (agent, *agent.subagents())}
    by_session: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for session, _, body in seen:
        by_session[session].append(body)
    assert {int(session.rpartition("-")[2]) for session in by_session} == set(planned)
    answers = {tuple(turn.request.token_ids) for turn in report.turns}
    for session, bodies in by_session.items():
        agent = planned[int(session.rpartition("-")[2])]
        assert [body["max_tokens"] for body in bodies] == [turn.output_tokens for turn in agent.turns]
        for before, after, turn in zip(bodies, bodies[1:], agent.turns[1:], strict=False):
            assert after["prompt"][: len(before["prompt"])] == before["prompt"]
            answer = after["prompt"][len(before["prompt"]) :][: before["max_tokens"]]
            assert tuple(answer) in answers
            assert len(after["prompt"]) == len(before["prompt"]) + before["max_tokens"] + turn.new_tokens
    starts = {tuple(bodies[0]["prompt"][: SETTINGS.system_tokens]) for bodies in by_session.values()}
    assert len(starts) == 1  # the shared instructions
    assert len({body["cache_salt"] for _, _, body in seen}) == 1


def test_a_subagent_continues_its_parents_context_and_names_its_session(serve, lead: Lead) -> None:
    seen: list[tuple[str, str, dict[str, Any]]] = []
    lead(serve(behave=note(seen)).url)
    parents = {session: parent for session, parent, _ in seen if parent}
    subagents = {each.number for agent in make_agents(SETTINGS) for each in agent.subagents()}
    assert {int(session.rpartition("-")[2]) for session in parents} == subagents
    for session, parent in parents.items():
        first = next(body["prompt"] for name, _, body in seen if name == session)
        contexts = [body["prompt"] for name, _, body in seen if name == parent]
        assert any(first[: len(context)] == context for context in contexts)


@pytest.mark.parametrize(
    ("hints", "has_pauses", "has_priorities"),
    [("none", False, False), ("pauses", True, False), ("priorities", False, True), ("all", True, True)],
)
def test_hints_are_announced_as_configured(
    serve, lead: Lead, hints: str, has_pauses: bool, has_priorities: bool
) -> None:
    seen: list[tuple[str, str, dict[str, Any]]] = []
    lead(serve(behave=note(seen)).url, hints=hints)
    planned = {each.number: each for agent in make_agents(SETTINGS) for each in (agent, *agent.subagents())}
    turns: dict[int, int] = defaultdict(int)
    priorities: dict[int, set[int | None]] = defaultdict(set)
    for session, _, body in seen:
        number = int(session.rpartition("-")[2])
        turn = turns[number]
        turns[number] += 1
        announces = has_pauses and turn < len(planned[number].turns) - 1
        assert ("hints" in body) == announces  # nothing after an agent's last turn
        priorities[number].add(body.get("priority"))
    by_start = sorted(make_agents(SETTINGS), key=lambda agent: agent.start_s)
    if has_priorities:
        order = [priorities[agent.number] for agent in by_start]
        assert all(len(each) == 1 for each in order)
        assert sorted(order, key=lambda each: next(iter(each))) == order
    else:
        assert set().union(*priorities.values()) == {None}


def test_two_runs_send_the_same_prompts_and_pauses_are_scaled_as_waits_are(serve, lead: Lead) -> None:
    runs: list[list[tuple[str, str, dict[str, Any]]]] = [[], []]
    for seen, scale in zip(runs, (0.0, 1e-3), strict=True):
        lead(serve(behave=note(seen)).url, hints="pauses", wait_scale=scale)
    prompts = [sorted(tuple(body["prompt"]) for _, _, body in seen) for seen in runs]
    assert prompts[0] == prompts[1]
    pauses = [{body["hints"]["pause_s"] for _, _, body in seen if "hints" in body} for seen in runs]
    assert pauses[0] == {0.0}
    assert pauses[1] <= {0.001, 0.004, 0.03, 2 * 0.001 * (1 * 5 + 4 * 3 + 30 * 2) / 10}


def test_the_report_counts_jobs_reuse_and_what_failed(serve, lead: Lead, tmp_path: Path) -> None:
    report = lead(serve().url)
    figures = json.loads((tmp_path / "out" / "agents.json").read_text())
    assert (figures["agents"], figures["ended"], figures["failed"]) == (3, 3, 0)
    assert figures["turns"] == figures["planned_turns"] == figures["completed"] == len(report.turns)
    assert figures["share_cached"] > 0.5
    assert figures["lost_turns"] == 0
    assert set(figures["jobs_s"]) == {"0", "1", "2"}
    lines = (tmp_path / "out" / "turns.jsonl").read_text().splitlines()
    assert sorted({json.loads(line)["job"] for line in lines}) == [0, 1, 2]

    async def fail(server: Any, request: web.Request, body: dict[str, Any]) -> web.Response | None:
        if request.headers["x-session-id"].endswith("-1"):
            return web.json_response({"error": {"message": "broken"}}, status=500)
        return None

    failed = lead(serve(behave=fail).url)
    assert not failed.ok
    assert (failed.figures["ended"], failed.figures["failed"]) == (2, 1)
    assert failed.figures["lost_turns"] == make_agents(SETTINGS)[1].num_turns()
    assert "broken" in failed.figures["reasons"][0]["reason"]


def test_reused_tokens_are_counted_by_the_place_that_the_server_reports(serve, lead: Lead) -> None:
    report = lead(serve().url)
    assert report.figures["reused_by_tier"] is None  # this server reports no places
    for turn in report.turns:
        turn.request.cached_tokens = 10
        turn.request.extension = {"cached_dram_tokens": 4, "cached_ssd_tokens": 0, "cached_remote_tokens": 1}
    load: Any = SimpleNamespace(records=report.turns, jobs_s={})
    found = summarise_agents(make_agents(SETTINGS), load)["reused_by_tier"]
    count = len(report.turns)
    assert found == {"pages": 5 * count, "dram": 4 * count, "ssd": 0, "remote": count}


def test_a_server_without_token_ids_is_named(serve, lead: Lead) -> None:
    report = lead(serve(token_ids=False).url)
    assert not report.ok
    assert "no token ids" in report.figures["reasons"][0]["reason"]


def test_contexts_beyond_the_models_are_refused_before_any_request(serve, lead: Lead) -> None:
    server = serve(max_model_len=64)
    with pytest.raises(ServerUnusable, match=r"longest context has .* at most 64: reduce --turns"):
        lead(server.url)
    assert server.bodies == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hints": "some"}, "--hints is some; expected none, pauses, priorities or all"),
        ({"wait_scale": -1.0}, "--wait-scale is -1.0"),
        ({"url": "here"}, "--url is here"),
    ],
)
def test_bad_settings_are_named(lead: Lead, change: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingInvalid, match=said):
        lead("http://127.0.0.1:1", **change) if "url" not in change else lead(change["url"])


def test_the_command_prints_its_figures_as_a_line_of_json(serve, tmp_path: Path) -> None:
    flags = ["--agents", "2", "--turns", "3", "--wait-scale", "0", "--hints", "all", "--out", str(tmp_path)]
    flags += ["--model-path", str(BUNDLED_MODEL)]
    done = CliRunner().invoke(app, ["--url", serve().url, *flags])
    assert done.exit_code == 0, done.output
    line = json.loads(done.output.strip().splitlines()[-1])
    assert (line["agents"], line["ended"], line["interrupted"]) == (2, 2, False)
    bad = CliRunner().invoke(app, ["--url", serve().url, *flags, "--prompt-to-output", "1"])
    assert bad.exit_code == 2
    assert "--prompt-to-output 1 leaves no tokens for tools" in bad.output


async def test_waits_of_tools_are_no_part_of_a_jobs_time(serve, tmp_path: Path) -> None:
    settings = AgentSettings(
        agents=1, turns=4.0, prompt_to_output=12.0, output_tokens=4.0, system_tokens=8, task_tokens=4.0,
        subagent_share=0.0, start_s=0.0, seed=2,
    )  # fmt: skip
    (agent,) = make_agents(settings)
    scale = 2.0 / agent.waits_s()
    config = AgentRunConfig(url=serve().url, out=tmp_path, model_path=BUNDLED_MODEL, agents=settings, wait_scale=scale)
    report = await asyncio.to_thread(run, config)
    (job_s,) = report.figures["jobs_s"].values()
    spans = [turn.request for turn in report.turns]
    assert spans[-1].end_s - spans[0].sent_s >= 2.0
    assert 0 < job_s < spans[-1].end_s - spans[0].sent_s - 1.0
