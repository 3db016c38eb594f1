"""Dialogues under virtual time: what they are, what is reused of them, where their turns go."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moonpool.cli import app
from simulator.dialogue_run import simulate_dialogues
from simulator.dialogues import DialogueSettings, Routing, make_dialogues, mean_history
from simulator.errors import BadSetting

ROOT = Path(__file__).parents[2]
SMALL = DialogueSettings(dialogues=60, mean_history_messages=40, servers=4, capacity=60, start_hours=1.0)
ROOMY = replace(SMALL, servers=1, capacity=100_000)


def test_the_mean_history_is_what_was_asked_for() -> None:
    dialogues = make_dialogues(DialogueSettings(dialogues=500))
    assert mean_history([len(dialogue.turns) for dialogue in dialogues]) == pytest.approx(180, abs=0.1)


def test_a_single_dialogue_has_its_mean_history_too() -> None:
    assert len(make_dialogues(replace(SMALL, dialogues=1))[0].turns) == 41


def test_dialogues_follow_from_the_seed() -> None:
    assert make_dialogues(SMALL) == make_dialogues(SMALL)
    assert make_dialogues(SMALL) != make_dialogues(replace(SMALL, seed=1))


def test_lengths_and_pauses_have_the_means_asked_for() -> None:
    turns = [turn for dialogue in make_dialogues(DialogueSettings(dialogues=300)) for turn in dialogue.turns]
    assert sum(turn.question_tokens for turn in turns) / len(turns) == pytest.approx(15, rel=0.05)
    assert sum(turn.answer_tokens for turn in turns) / len(turns) == pytest.approx(50, rel=0.05)
    assert sum(turn.pause_s for turn in turns) / len(turns) == pytest.approx(0.98 * 30 + 0.02 * 3000, rel=0.1)


def test_with_room_for_all_every_old_token_is_reused() -> None:
    run = simulate_dialogues(ROOMY)
    assert run.evicted_blocks == 0
    assert run.reused == run.reused_limit


def test_without_tails_only_full_blocks_are_reused() -> None:
    run = simulate_dialogues(replace(ROOMY, tails=False))
    assert run.reused_tokens % ROOMY.block_tokens == 0
    lost = run.reused_limit - run.reused
    # Half a block a turn, about.
    assert lost * run.prompt_tokens / run.turns == pytest.approx(ROOMY.block_tokens / 2, rel=0.2)


def test_tails_leave_no_more_blocks_behind_than_dialogues() -> None:
    with_tails = simulate_dialogues(replace(ROOMY, capacity=1_000))
    assert with_tails.blocks_made + ROOMY.dialogues <= 1_000, "the pool of this test must hold all"
    assert with_tails.evicted_blocks == 0


def test_dialogues_that_stick_reuse_more_than_wandering_ones() -> None:
    sticky, random, in_turn = (simulate_dialogues(replace(SMALL, routing=routing)) for routing in Routing)
    assert sticky.evicted_blocks > 0
    assert sticky.reused > random.reused + 0.1
    assert sticky.reused > in_turn.reused + 0.1
    assert max(in_turn.turns_per_server) - min(in_turn.turns_per_server) <= 1
    assert sticky.turns == sum(sticky.turns_per_server)


def test_a_queue_that_is_too_long_makes_dialogues_move() -> None:
    busy = replace(SMALL, decode_tokens_per_s=4.0, capacity=100_000)
    strict, loose = (simulate_dialogues(replace(busy, balance_s=bound)) for bound in (0.0, 1e9))
    assert loose.moved_turns == 0
    assert strict.moved_turns > 0
    assert strict.mean_wait_s < loose.mean_wait_s


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"servers": 0}, "servers must be above 0, got 0"),
        ({"capacity": -1}, "capacity must be above 0"),
        ({"mean_history_messages": 1.0}, "mean_history_messages must be at least 2"),
        ({"mean_history_messages": float("nan")}, "mean_history_messages must be above 0, got nan"),
        ({"break_share": 1.5}, "break_share must be from 0 to 1"),
        ({"balance_s": -1.0}, "balance_s must be at least 0"),
        ({"policy": "mru"}, "unknown policy 'mru'"),
    ],
)
def test_settings_that_cannot_be_are_named(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadSetting, match=complaint):
        replace(SMALL, **change)


def test_the_command_ends_with_a_line_of_json() -> None:
    arguments = ["simulate", "dialogues", "--dialogues", "20", "--mean-history", "20", "--capacity", "20"]
    one = CliRunner().invoke(app, arguments)
    assert one.exit_code == 0, one.output
    figures = json.loads(one.stdout.splitlines()[-1])
    assert figures["dialogues"] == 20
    assert figures["mean_history_messages"] == pytest.approx(20, abs=0.5)
    assert 0 < figures["reused"] <= figures["reused_limit"]
    two = CliRunner().invoke(app, [*arguments, "--routing", "sticky,random"])
    assert [run["routing"] for run in json.loads(two.stdout.splitlines()[-1])] == ["sticky", "random"]


@pytest.mark.parametrize(
    ("flag", "value", "complaint"),
    [("--routing", "nearest", "got 'nearest'"), ("--servers", "0", "servers must be above 0")],
)
def test_the_command_refuses_what_cannot_be(flag: str, value: str, complaint: str) -> None:
    done = CliRunner().invoke(app, ["simulate", "dialogues", flag, value])
    assert done.exit_code == 2
    assert complaint in done.stderr


def test_the_benchmark_prints_its_figures_last() -> None:
    script = [sys.executable, "benchmarks/dialogues.py", "--dialogues", "30"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True, timeout=200)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["mean_history_messages"] == pytest.approx(180, abs=1)
    assert figures["reused_random"] <= figures["reused_sticky"] <= figures["reused_limit"]
    assert figures["reused_sticky_no_tails"] < figures["reused_sticky"]
    assert {"evicted_blocks", "dialogues"} <= figures.keys()
