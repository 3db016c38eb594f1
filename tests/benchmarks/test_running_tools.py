"""Running a tool: where its output goes, and what is said when it fails, hangs or is not there."""

import time
from pathlib import Path

import psutil
import pytest

from benchmarks.clients import context as running
from benchmarks.clients.context import Context, run_tool
from benchmarks.clients.environments import Environment, fingerprint
from benchmarks.clients.errors import ToolFailed, ToolMissing


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    (tmp_path / "env" / "bin").mkdir(parents=True)
    return Environment("aiperf", tmp_path / "env")


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context("http://127.0.0.1:9", "moonpool", tmp_path, tmp_path / "work", tmp_path / "hub")


def install(environment: Environment, script: str) -> None:
    path = environment.folder / "bin" / environment.tool
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_tool_runs_in_its_folder_with_its_arguments_offline(environment: Environment, context: Context) -> None:
    install(environment, 'echo "$1 $HF_HUB_OFFLINE" > seen; echo told')
    log = run_tool(context, environment, "profile")
    assert (context.work / "seen").read_text() == "profile 1\n"
    assert log.read_text() == "told\n"


def test_a_failure_tells_the_end_of_what_the_tool_said(environment: Environment, context: Context) -> None:
    install(environment, "echo no such trace >&2; exit 3")
    with pytest.raises(ToolFailed, match=r"aiperf ended with exit code 3(.|\n)*no such trace"):
        run_tool(context, environment)


def test_a_tool_that_hangs_is_ended_with_its_children(
    environment: Environment, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "RUN_S", 1.0)
    install(environment, "sleep 600 & echo $! > child; wait")
    with pytest.raises(ToolFailed, match="did not end within 1 s"):
        run_tool(context, environment)
    child = int((context.work / "child").read_text())
    deadline_s = time.monotonic() + 30
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "the child still runs"
        time.sleep(0.02)  # the kernel ends it in its own time


def test_a_tool_that_is_not_there_is_named(environment: Environment, context: Context) -> None:
    with pytest.raises(ToolMissing, match=r"aiperf\.txt was installed, but there is no .*bin/aiperf"):
        run_tool(context, environment)


def test_an_environment_that_is_as_pinned_is_not_made_again(environment: Environment) -> None:
    (environment.folder / ".requirements").write_text(fingerprint(environment.requirements))
    before = sorted(environment.folder.rglob("*"))
    environment.install()
    assert sorted(environment.folder.rglob("*")) == before
    assert not list(environment.folder.parent.glob("*.log"))
