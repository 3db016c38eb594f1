"""`moonpool chat` against a real cluster: in a pipe, and in a terminal where Ctrl-C stops an answer."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 60.0


@pytest.fixture(scope="module")
def cluster(start_paced: Callable[..., Any]) -> Iterator[Any]:
    with start_paced("--block-tokens", "8", "--served-model-name", "tiny") as running:
        yield running


class Terminal:
    """A program that runs in a terminal of its own, and what it has shown."""

    def __init__(self, *command: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "dumb", "COLUMNS": "200"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C is for it
        )
        os.close(slave)
        self._unread = ""

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def shows(self, pattern: str) -> str:
        """Return the output up to and including the pattern."""
        give_up = time.monotonic() + WAIT_S
        while (found := re.search(pattern, self._unread)) is None:
            ready = select.select([self._master], [], [], max(0.0, give_up - time.monotonic()))[0]
            assert ready, f"{pattern!r} not within {WAIT_S:g} s in {self._unread!r}"
            try:
                self._unread += os.read(self._master, 1 << 16).decode(errors="replace")
            except OSError as error:  # the chat has ended
                raise AssertionError(f"{pattern!r} not in {self._unread!r}, and the chat has ended") from error
        shown, self._unread = self._unread[: found.end()], self._unread[found.end() :]
        return shown

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(cluster: Any) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_chat(*flags: str) -> Terminal:
        opened.append(Terminal(sys.executable, "-m", "moonpool", "chat", "--url", cluster.url, *flags))
        return opened[-1]

    yield open_chat
    for one in opened:
        one.close()


def test_the_next_turn_finds_the_conversation_in_the_cache(cluster: Any, tmp_path: Path) -> None:
    file = tmp_path / "said.json"
    question = "The old miller carried a copper lantern beyond the northern gate. Who carried it?"
    flags = ["--temperature", "0", "--max-tokens", "24", "--figures"]
    ended = subprocess.run(
        [sys.executable, "-m", "moonpool", "chat", "--url", cluster.url, *flags],
        input=f"{question}\nAnd then?\n/save {file}\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    line = r"TTFT [\d.]+ s · [\d.]+ tokens/s · (\d+) of (\d+) prompt tokens cached · prefill-0 → decode-0"
    figures = re.findall(line, " ".join(ended.stderr.split()))
    (_, first_prompt), (second_cached, _) = figures
    assert int(second_cached) >= int(first_prompt) // 8 * 8
    answers = [m["content"] for m in json.loads(file.read_text())["messages"] if m["role"] == "assistant"]
    assert len(answers) == 2
    assert all(answer in ended.stdout for answer in answers)


async def test_ctrl_c_stops_an_answer_and_leaves_at_the_prompt(cluster: Any, terminal: Callable[..., Terminal]) -> None:
    chat = terminal("--max-tokens", "1900", "--seed", "5")
    chat.shows(r"tiny at http.*2048 tokens of context.*\n> ")
    chat.type("Tell me everything.\n")
    chat.shows(r"everything\.\r\n.*\S")
    chat.type("\x03")
    chat.shows(r"stopped\r\n> ")
    await cluster.validate()  # the server has stopped too: it would still be generating
    chat.type("/undo\n")
    chat.shows(r"removed: Tell me everything\.\r\n> ")
    chat.type("\x03")
    assert chat.process.wait(WAIT_S) == 0


def test_an_error_in_a_terminal_does_not_end_the_chat(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("--max-tokens", "4")
    chat.shows("\n> ")
    chat.type("/sve\n")
    chat.shows(r"did you mean /save\?.*\r\n> ")
    for _ in range(2):
        chat.type("word " * 700 + "\n")
        chat.shows(r"cut at 4 tokens\r\n> ")
    chat.type("word " * 700 + "\n")
    chat.shows(r"/undo or /reset makes the conversation shorter\r\n> ")
    chat.type("/undo\n")
    chat.type("Hello\n")
    chat.shows(r"TTFT [\d.]+ s .*cached.*\r\n> ")
    chat.type("/quit\n")
    assert chat.process.wait(WAIT_S) == 0
