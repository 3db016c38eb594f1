"""Dialogues: a closed loop whose answers come back, planned by a seed, that loses nothing of what it has."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from aiohttp import web

from loadtest.dialogue_config import DialogueConfig
from loadtest.dialogue_report import DialogueReport
from loadtest.dialogue_runner import run
from loadtest.dialogue_turns import planned_turns, system_text
from loadtest.errors import SettingInvalid
from loadtest.tokens import ModelTokens
from tests.chromium import look_at

BUNDLED_MODEL = Path(__file__).parents[2] / "moonpool" / "data" / "model"

Lead = Callable[..., DialogueReport]


@pytest.fixture
def lead(tmp_path: Path) -> Lead:
    """Leads short dialogues without think time."""

    def start(url: str, **changes: Any) -> DialogueReport:
        values: dict[str, Any] = {
            "url": url,
            "out": tmp_path / "out",
            "model_path": BUNDLED_MODEL,
            "dialogues": 2,
            "turns": 4,
            "think_time_s": 0.0,
            "system_tokens": 0,
            "turn_tokens": 6,
            "answer_tokens": 5,
        }
        return run(DialogueConfig(**(values | changes)))

    return start


def test_every_answer_comes_back_as_history(serve, lead: Lead) -> None:
    server = serve()
    report = lead(server.url, system_tokens=8)
    assert report.ok
    chats: dict[str, list[list[dict[str, str]]]] = {}
    for body in server.bodies:
        chats.setdefault(body["messages"][1]["content"], []).append(body["messages"])
    assert [len(turns) for turns in chats.values()] == [4, 4]
    for turns in chats.values():
        assert turns[0][0]["role"] == "system"
        for before, after in pairwise(turns):
            assert after[: len(before)] == before
            answer, question = after[len(before) :]
            assert (answer["role"], question["role"]) == ("assistant", "user")
            assert set(answer["content"]) == {"x"}  # as the server answered
    assert len({body["cache_salt"] for body in server.bodies}) == 1


def test_the_requests_of_a_dialogue_name_one_session(serve, lead: Lead) -> None:
    sessions: dict[str, set[str]] = {}

    async def note(server: Any, request: web.Request, body: dict[str, Any]) -> None:
        sessions.setdefault(request.headers["x-session-id"], set()).add(body["messages"][0]["content"])

    server = serve(behave=note)
    assert lead(server.url).ok
    assert [len(beginnings) for beginnings in sessions.values()] == [1, 1]
    assert len(server.bodies) == 8


def test_so_many_dialogues_go_on_at_a_time_and_the_next_begin_when_they_end(serve, lead: Lead) -> None:
    server = serve(token_delay_s=0.002)
    report = lead(server.url, total=5)
    f = report.figures
    assert (f["dialogues"], f["turns"], f["completed"], f["planned_turns"]) == (5, 20, 20, 20)
    assert [row["dialogues"] for row in f["by_turn"]] == [5] * 4
    spans = sorted((t.request.sent_s, t.request.end_s) for t in report.turns)
    for sent, _ in spans:
        assert sum(a <= sent < b for a, b in spans) <= 2


def test_a_failed_turn_ends_its_dialogue_and_no_other(serve, lead: Lead) -> None:
    async def behave(server: Any, request: Any, body: dict[str, Any]) -> Any:
        if len(server.bodies) == 3:
            return web.json_response({"error": {"message": "decode node lost"}}, status=500)
        return None

    report = lead(serve(behave=behave).url)
    f = report.figures
    assert (f["failed"], f["dialogues"], report.ok) == (1, 2, False)
    assert f["completed"] < 8
    assert len([t for t in report.turns if t.completed and t.turn == 3]) == 1
    assert f["reasons"] == [{"outcome": "failed", "reason": "HTTP 500: decode node lost", "count": 1}]


def test_a_rejected_turn_is_asked_again(serve, lead: Lead) -> None:
    async def behave(server: Any, request: Any, body: dict[str, Any]) -> Any:
        if len(server.bodies) == 2:
            return web.json_response({"error": {"message": "busy"}}, status=429, headers={"Retry-After": "0"})
        return None

    server = serve(behave=behave)
    report = lead(server.url)
    assert (report.figures["completed"], report.figures["rejected"], len(server.bodies)) == (8, 0, 9)


@pytest.mark.parametrize("truncation", ["disabled", "auto"])
def test_a_dialogue_that_fills_the_context_ends_unless_the_server_is_to_cut_it(
    serve, lead: Lead, truncation: str
) -> None:
    server = serve(max_model_len=70)
    report = lead(server.url, turns=30, truncation=truncation)
    assert report.figures["failed"] == 0
    if truncation == "auto":
        assert report.figures["completed"] == 60
        assert all(body["truncation"] == "auto" for body in server.bodies)
    else:
        assert report.figures["completed"] < 60
        assert not any("truncation" in body for body in server.bodies)


def test_an_interrupt_gives_what_there_is(serve, lead: Lead) -> None:
    async def behave(server: Any, request: Any, body: dict[str, Any]) -> None:
        if len(server.bodies) == 6:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()

    report = lead(serve(behave=behave).url, turns=2000, think_time_s=0.01)
    f = json.loads((report.out / "dialogues.json").read_text())
    assert f["interrupted"] is True
    assert 4 <= f["completed"] < 4000
    lines = (report.out / "turns.jsonl").read_text().splitlines()
    assert len(lines) == f["turns"]
    assert json.loads(lines[0])["text"].startswith("x")
    assert "interrupted" in (report.out / "dialogues.html").read_text()


def test_the_page_fetches_nothing_and_shows_three_pictures(serve, lead: Lead) -> None:
    report = lead(serve().url)
    html = (report.out / "dialogues.html").read_text()
    assert html.count("<svg") == 3
    look_at(report.out / "dialogues.html")
    assert not re.search(r"<script|<link|(?:src|href)=\"(?!#)", html)


def test_answers_that_cannot_be_scored_are_told_and_the_rest_is_kept(serve, lead: Lead) -> None:
    report = lead(serve().url, verify=True)  # this server tells no ids of chats
    assert report.figures["verified_turns"] == 0
    assert report.figures["completed"] == 8
    assert "cannot be re-scored" in report.figures["notices"][-1]


def test_the_seed_decides_texts_lengths_and_times(tokens: ModelTokens) -> None:
    config = DialogueConfig(url="http://h", out=Path("o"), model_path=BUNDLED_MODEL, turns=200)
    one, again = (list(planned_turns(config, 3, tokens)) for _ in "ab")
    assert one == again
    assert one != list(planned_turns(config, 4, tokens))
    assert one != list(planned_turns(replace(config, seed=1), 3, tokens))
    assert len({turn.question for turn in one}) == 200
    assert mean(turn.max_tokens for turn in one) == pytest.approx(32, rel=0.15)
    assert mean(turn.think_s for turn in one) == pytest.approx(1.0, rel=0.25)
    lengths = [len(ids) for ids in tokens.encode_all([turn.question for turn in one])]
    assert mean(lengths) == pytest.approx(24, rel=0.15)
    assert len(tokens.encode_all([system_text(config, tokens)])[0]) == 32
    assert one[0].think_s == 0


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [("turns", 0, "--turns"), ("think_time_s", -1.0, "--think-time"), ("truncation", "always", "--truncation")],
)
def test_a_wrong_setting_is_refused_by_its_flag(field: str, value: Any, flag: str) -> None:
    with pytest.raises(SettingInvalid, match=flag):
        DialogueConfig(**{"url": "http://h", "out": Path("o"), "model_path": Path("m"), field: value})
