"""Names of commands and flags: those of the groups, and the earlier ones, which scripts use."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from moonpool.cli import app
from moonpool.commands.lazy import every_command

EARLIER: dict[str, str] = json.loads(Path(__file__).with_name("earlier_commands.json").read_text(encoding="utf-8"))
GROUPED = {
    "replay": "trace replay",
    "dialogues": "bench dialogues",
    "profile": "bench profile",
    "explain": "decisions explain",
    "replay-decisions": "decisions replay",
    "scale": "node scale",
    "drain": "node drain",
    "switch": "node switch",
    "conductor": "node conductor",
    "pool-node": "node pool",
    "prefill-node": "node prefill",
    "decode-node": "node decode",
    "aggregated-node": "node aggregated",
    "frontend": "node frontend",
    "endpoint-picker": "node endpoint-picker",
}


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    """All commands by full name."""
    return every_command(app)


@pytest.mark.parametrize("path", EARLIER)
def test_every_earlier_command_shows_its_help(path: str) -> None:
    shown = CliRunner().invoke(app, [*path.split(), "--help"])
    assert shown.exit_code == 0
    assert "Usage:" in shown.output


@pytest.mark.parametrize("path", EARLIER)
def test_every_earlier_flag_is_still_accepted(path: str, commands: dict[str, Any]) -> None:
    flags = {flag for option in commands[path].params for flag in (*option.opts, *option.secondary_opts)}
    assert set(EARLIER[path].split()) <= flags


def test_an_earlier_flag_is_hidden_and_not_accepted_with_the_new_one(commands: dict[str, Any]) -> None:
    flags = {flag: option for option in commands["serve"].params for flag in option.opts}
    assert flags["--undivided"].hidden
    assert not flags["--colocated-prefill"].hidden
    done = CliRunner().invoke(app, ["serve", "--undivided", "act", "--colocated-prefill", "act"])
    assert done.exit_code != 0
    assert "--undivided and --colocated-prefill are two names of one setting" in done.output


def test_an_earlier_name_is_hidden_and_has_the_flags_of_the_grouped_command(commands: dict[str, Any]) -> None:
    top = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for earlier, grouped in GROUPED.items():
        assert top[earlier].hidden
        names = [[(param.name, param.opts) for param in commands[name].params] for name in (earlier, grouped)]
        assert names[0] == names[1]


def test_the_top_level_shows_no_earlier_name() -> None:
    top = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    shown = (
        "serve chat demo config status top validate doctor download node pool slo trace bench simulate decisions "
        "model droidspeak keys"
    )
    assert {name for name, command in top.items() if not command.hidden} == set(shown.split())
