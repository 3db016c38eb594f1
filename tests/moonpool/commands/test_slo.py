"""`moonpool slo …` against a conductor that lives, and what a file of objectives may hold."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conductor.config import ConductorConfig
from conductor.server import serve_conductor
from frontend.api_keys import ApiKeys
from moonpool.commands.slo import app
from moonpool.config import ConductorRole, load
from moonpool.errors import ConfigError
from moonpool.role_configs import conductor_config
from settings.keys import assemble, composite_settings

OBJECTIVES = """
classes:
  chat: {ttft: 5x p95, tbt: 100ms}
  batch: {ttft: off, priority: 10}
default_class: chat
"""


class Commands:
    """The commands, as typed for one conductor."""

    def __init__(self, target: str, folder: Path) -> None:
        self._target = target
        self.folder = folder

    def write(self, text: str, name: str = "slo.yaml") -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    async def run(self, *arguments: str, expect: int = 0, stdin: str = "") -> str:
        """Return the output of both streams."""
        where = [] if arguments[0] == "tenant" else ["--conductor", self._target]
        done = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, *where], stdin)
        assert done.exit_code == expect, done.output
        return str(done.output)


@pytest.fixture
async def slo(tmp_path: Path) -> AsyncIterator[Commands]:
    target = f"unix:{tmp_path}/c.sock"
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    config = assemble(ConductorConfig, listen=target, node_id="conductor-7", shared_refresh_s=0.05, slo_dir=tmp_path)
    serving = asyncio.create_task(serve_conductor(config, stop, ready.set_result))
    await ready
    yield Commands(target, tmp_path)
    stop.set()
    async with asyncio.timeout(60):
        await serving


async def test_what_is_shown_as_yaml_can_be_set_again(slo: Commands) -> None:
    said = await slo.run("set", slo.write(OBJECTIVES), "--reason", "the launch", "--author", "alice")
    assert "version 2 is in force" in said
    assert "classes.chat.ttft: not there -> 5x p95" in said
    assert "acknowledged by conductor-7" in said
    shown = await slo.run("show", "--yaml")
    again = await slo.run("set", slo.write(shown, "again.yaml"), "--reason", "again")
    assert "nothing to change: version 2 has the same objectives" in again


async def test_show_tells_who_why_and_who_goes_by_it(slo: Commands) -> None:
    await slo.run("set", slo.write(OBJECTIVES), "-r", "the launch", "--author", "alice")
    shown = await slo.run("show")
    for said in (
        "version 2",
        "by alice (admin",
        "reason: the launch",
        "acknowledged by conductor-7: version 2",
        "5x p95",
    ):
        assert said in shown
    told = json.loads(await slo.run("show", "--json"))
    assert told["objectives"]["default_class"] == "chat"
    assert told["acknowledged"] == [{"conductor": "conductor-7", "version": 2, "digest": told["digest"]}]
    assert "no objectives" in await slo.run("show", "--version", "1")


async def test_history_and_rollback(slo: Commands) -> None:
    await slo.run("set", slo.write(OBJECTIVES), "-r", "the launch", "--author", "alice")
    await slo.run("rollback", "1", "-r", "too many rejections", "--author", "bob", "--expect-version", "2")
    told = json.loads(await slo.run("history", "--json"))
    assert [(each["version"], each["author"], each["how"]) for each in told] == [
        (3, "bob", "rollback to 1"),
        (2, "alice", "admin"),
        (1, "configuration", "configuration"),
    ]
    table = await slo.run("history", "--limit", "2")
    assert "too many rejections" in table
    assert "configuration" not in table


async def test_a_version_that_is_no_more_in_force_stops_a_change(slo: Commands) -> None:
    await slo.run("set", slo.write(OBJECTIVES), "-r", "the launch", "--author", "alice")
    said = await slo.run("set", slo.write("{}"), "-r", "late", "--expect-version", "1", expect=1)
    assert "expected version 1, but version 2 by alice (admin: the launch) is in force" in said


async def test_check_says_what_would_change_and_changes_nothing(slo: Commands) -> None:
    said = await slo.run("check", slo.write(OBJECTIVES + "models: {other: {tbt: 1s}}\n"), expect=1)
    assert "against version 1:" in said
    assert "default_class: not there -> chat" in said
    assert "warning: no node currently serves the model 'other'" in said
    assert "nothing would change" in await slo.run("check", slo.write(""))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cluster: {ttft: -1s}", "cluster.ttft is '-1s'"),
        ("cluster: {ttft: .nan}", "must not contain infinite numbers"),
        ("cluster: {ttft: 1s, ttft: 2s}", "the key 'ttft' is given twice"),
        ("cluster: {ttft: 2026-01-01}", "must contain only strings, numbers, lists and mappings"),
        ("a: [", "not valid YAML"),
        ("tenants: {0123: {ttft: 1s}}", "the name 83 must be a string"),
        ("[" * 5000, "must be nested at most 32 levels deep"),
        ("x" * (1 << 21), "at most 1048576"),
    ],
)
async def test_a_file_that_cannot_be_right_is_refused_and_named(slo: Commands, text: str, said: str) -> None:
    output = await slo.run("set", slo.write(text), "-r", "a test", expect=2)
    assert said in output
    assert json.loads(await slo.run("show", "--json"))["version"] == 1


async def test_a_conductor_that_is_away_is_told(slo: Commands) -> None:
    done = await asyncio.to_thread(CliRunner().invoke, app, ["show", "--conductor", f"unix:{slo.folder}/nobody.sock"])
    assert done.exit_code == 1
    assert "the conductor does not answer" in done.output


async def test_tenant_names_the_tenant_of_a_key_as_the_frontend_does(slo: Commands) -> None:
    keys = ApiKeys(("secret-1",))
    named = (await slo.run("tenant", stdin="secret-1\n")).strip()
    assert named == keys.caller("Bearer secret-1").tenant == keys.tenants[0]
    assert "expected one API key" in await slo.run("tenant", stdin="", expect=2)


def role(**flags: Any) -> ConductorRole:
    return load(ConductorRole, flags=flags, environ={}, config_file=None, known=composite_settings(ConductorRole))


def test_a_configured_file_holds_the_first_objectives_and_is_alone_in_that(tmp_path: Path) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text(OBJECTIVES)
    config = conductor_config(role(slo_file=str(path), state_dir=str(tmp_path / "state"), slo_force="true"), "c")
    assert config.objectives is not None
    assert config.objectives.classes["chat"].ttft is not None
    assert config.objectives.classes["chat"].ttft.percentile == 95.0
    assert (config.slo.slo_dir, config.slo.slo_force) == (tmp_path / "state" / "objectives", True)
    with pytest.raises(ConfigError, match=r"omit --ttft-slo, or write them to the file"):
        conductor_config(role(slo_file=str(path), ttft_slo="2"), "c")
    with pytest.raises(ConfigError, match=r"those of the model 'small'"):
        conductor_config(role(slo_file=str(path), models="small=/m/small,tbt_slo=1"), "c")
    path.write_text("classes: {chat: {ttft: soon}}")
    with pytest.raises(ConfigError, match=r"slo.yaml: classes.chat.ttft is 'soon'"):
        conductor_config(role(slo_file=str(path)), "c")


@pytest.mark.parametrize("path", ["/nowhere/slo.yaml", "x" * 5000])
def test_a_configured_file_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(ConfigError, match="must be an existing file"):
        role(slo_file=path)
