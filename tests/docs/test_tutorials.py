"""The tutorials that need nothing but this project are run to the letter: every shell block, in order."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
TESTED = ("first-slo", "replay-your-log", "plan-a-cluster", "agents")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAVED = re.compile(r"[Ss]ave this as `([\w.]+)`:\s*$")
READY_S = 300


class Reader:
    """Someone who follows a page in a folder of their own, with a cluster in another terminal."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._port = folder, port
        bin_folder = str(Path(sys.executable).parent)
        self._environment = os.environ | {
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            "MOONPOOL_URL": f"http://127.0.0.1:{port}",
        }
        self._server: subprocess.Popen[bytes] | None = None

    def save(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text, encoding="utf-8")

    def run(self, block: str) -> str:
        """Run a block; return what it printed."""
        if block.startswith("moonpool serve"):
            self._serve(block)
            return ""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.replace(":8000", f":{self._port}")],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _serve(self, line: str) -> None:
        assert self._server is None
        ready = self._folder / "ready.json"
        with (self._folder / "serve.log").open("wb") as log:
            command = [*shlex.split(line), "--port", str(self._port), "--ready-file", str(ready)]
            self._server = subprocess.Popen(
                command, cwd=self._folder, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + READY_S
        while not ready.exists():
            assert self._server.poll() is None, (self._folder / "serve.log").read_text()
            assert time.monotonic() < deadline, (self._folder / "serve.log").read_text()
            time.sleep(0.1)
        # Other clusters of this user may run; a reader has one.
        self._environment["MOONPOOL_CONDUCTOR"] = json.loads(ready.read_text(encoding="utf-8"))["conductor"]

    def leave(self) -> None:
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(signal.SIGTERM)
            try:
                self._server.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self._server.pid, signal.SIGKILL)
                raise


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path, free_port())
    try:
        yield reader
    finally:
        reader.leave()


def steps(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield (language, block, the text before it) of the page's blocks."""
    end = 0
    for block in _BLOCK.finditer(page):
        yield block[1], block[2], page[end : block.start()]
        end = block.end()


@pytest.mark.parametrize("name", TESTED)
def test_a_tutorial_works_to_the_letter(name: str, reader: Reader) -> None:
    page = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text(encoding="utf-8")
    printed = ""
    for language, block, before in steps(page):
        if language == "bash":
            printed += reader.run(block)
        elif saved := _SAVED.search(before.strip()):
            reader.save(saved[1], block)
    expected = {
        "first-slo": ("version 2 is in force", "predicted to be", "ttft"),
        "replay-your-log": ("200", "report.html"),
        "plan-a-cluster": ("goodput", "hit_rate"),
        "agents": ("Tom lives in Rome.", "Mira lives in Oslo.", "mean job time"),
    }[name]
    assert [text for text in expected if text not in printed] == []


def test_the_index_says_which_tutorials_are_tested() -> None:
    index = (ROOT / "docs" / "tutorials" / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"\]\(([\w-]+)\.md\).*\| (.*) \|$", index, re.MULTILINE)
    assert {name for name, state in rows if state == "tested"} == set(TESTED)
    assert {name for name, _ in rows} == {page.stem for page in (ROOT / "docs" / "tutorials").glob("*.md")} - {"index"}
