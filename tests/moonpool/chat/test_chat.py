"""The chat without a cluster: what lines mean, what is kept, and what it says of a server that fails."""

import asyncio
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from moonpool.chat.client import ChatAnswer, _take
from moonpool.chat.conversation import COMMANDS, ChatLine, ChatTurn, Conversation, parse
from moonpool.chat.loop import ChatView, printable
from moonpool.errors import ChatCommandError, ChatFileError


def event(payload: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(payload)}\n\n".encode()


class ChatServer:
    """Speaks the chat protocol. `script` names what goes wrong; answers tell what was asked."""

    def __init__(self) -> None:
        self.script = "well"
        self.key = ""
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    async def models(self, request: web.Request) -> web.StreamResponse:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        return web.json_response({"data": [{"id": "tiny"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.script == "busy":
            return web.json_response({"error": {"message": "full"}}, status=429, headers={"Retry-After": "7"})
        if self.script == "long":
            error = {"message": "too many tokens", "code": "context_length_exceeded"}
            return web.json_response({"error": error}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in (f"{len(body['messages'])}: ", body["messages"][-1]["content"], " \x1b[2J "):
            await response.write(event({"choices": [{"delta": {"content": piece}, "finish_reason": None}]}))
        if self.script == "error":
            await response.write(event({"error": {"message": "a worker fell over"}}))
        if self.script in ("error", "cut"):
            return response
        await response.write(event({"choices": [{"delta": {}, "finish_reason": "stop"}]}))
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
        nodes = {"prefill_node": "p0", "decode_node": "d0"}
        await response.write(event({"choices": [], "usage": usage, "moonpool": nodes}))
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
def server() -> Iterator[ChatServer]:
    scripted, ready = ChatServer(), threading.Event()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", scripted.models)
        app.router.add_post("/v1/chat/completions", scripted.chat)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        scripted.url = f"http://{host}:{port}"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(20)
    yield scripted
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


Chat = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def chat(server: ChatServer) -> Chat:
    """Pipes lines into `moonpool chat`."""

    def run(text: str, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MOONPOOL_")}
        command = [sys.executable, "-m", "moonpool", "chat", "--url", server.url, *flags]
        return subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=60, check=False, env={**kept, **environ}
        )

    return run


def test_a_line_is_a_question_or_a_command() -> None:
    assert parse("  \n") is None
    assert parse("Who are you?\n") == ChatLine("", "Who are you?")
    assert parse("//etc is a folder") == ChatLine("", "/etc is a folder")
    assert parse("/save  a b.json ") == ChatLine("/save", "a b.json")
    assert parse("/system") == ChatLine("/system", "")


@pytest.mark.parametrize(
    ("line", "said"),
    [("/rest", "did you mean /reset"), ("/save", "needs the argument FILE"), ("/undo 2", "takes no argument, got '2'")],
)
def test_a_wrong_command_is_told_what_was_expected(line: str, said: str) -> None:
    with pytest.raises(ChatCommandError, match=said):
        parse(line)


def test_a_conversation_survives_its_file_to_the_letter() -> None:
    said = Conversation("Be brief.", [ChatTurn("a", " b\n\n"), ChatTurn("é\t", "\u2028 ")])
    assert Conversation.from_json(said.to_json("m")) == said
    assert json.loads(said.to_json("m"))["messages"] == said.messages()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"messages": 3}',
        '{"messages": [{"role": "user", "content": "x"}]}',
        '{"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]}',
        '{"messages": [{"role": "user", "content": []}, {"role": "assistant", "content": "y"}]}',
    ],
)
def test_what_is_no_conversation_is_refused(text: str) -> None:
    with pytest.raises(ChatFileError, match="must"):
        Conversation.from_json(text)


def test_nothing_that_a_server_says_moves_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    view = ChatView(interactive=False, figures=True)
    view.notice("node\x1b[2J")
    view.error("busy\x1b[2J")
    assert capsys.readouterr().err == "node\ufffd[2J\nError: busy\ufffd[2J\n"


def test_half_a_character_can_be_shown() -> None:
    shown: list[str] = []
    _take('{"choices": [{"delta": {"content": "a\\ud83d"}}]}', 0.0, ChatAnswer(), shown.append)
    assert shown == ["a\ufffd"]


def test_figures_of_an_odd_server_are_left_out() -> None:
    answer = ChatAnswer(text="a", ttft_s=0.5, last_s=1.0)
    _take('{"usage": ["a"], "moonpool": "a"}', 0.0, answer, print)
    assert answer.figures() == "TTFT 0.50 s"
    odd = {"completion_tokens": "3", "prompt_tokens": 9, "prompt_tokens_details": [1]}
    _take(json.dumps({"usage": odd, "moonpool": {"prefill_node": ["p"]}}), 0.0, answer, print)
    assert answer.figures() == "TTFT 0.50 s · 0 of 9 prompt tokens cached · ['p']"


def test_an_answer_cannot_move_the_cursor() -> None:
    assert printable("a\x1b[2Jb\tc\nd\r\x9b") == "a\ufffd[2Jb\tc\nd\ufffd\ufffd"


def test_figures_leave_out_what_the_server_does_not_tell() -> None:
    usage = {"prompt_tokens": 40, "completion_tokens": 11}
    assert ChatAnswer(ttft_s=0.5, last_s=2.5, usage=usage).figures() == (
        "TTFT 0.50 s · 5.0 tokens/s · 0 of 40 prompt tokens cached"
    )
    assert ChatAnswer().figures() == ""


def test_piped_questions_give_plain_answers_in_one_conversation(chat: Chat, server: ChatServer) -> None:
    ended = chat("one\n\ntwo\n", "--system", "Be brief.", "--temperature", "0", "--seed", "3", "--max-tokens", "5")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "2: one \x1b[2J \n4: two \x1b[2J \n"
    second = server.bodies[1]
    assert [message["content"] for message in second["messages"]] == ["Be brief.", "one", "2: one \x1b[2J ", "two"]
    assert (second["temperature"], second["seed"], second["max_tokens"], second["model"]) == (0, 3, 5, "tiny")


def test_options_not_given_are_left_to_the_server(chat: Chat, server: ChatServer) -> None:
    assert chat("x\n").returncode == 0
    assert set(server.bodies[0]) == {"model", "messages", "stream", "stream_options"}


def test_every_command_does_what_it_says(chat: Chat, server: ChatServer, tmp_path: Path) -> None:
    file = tmp_path / "said.json"
    lines = ["one", "two", "/undo", "three", f"/save {file}", "/reset", "four", f"/load {file}", "five"]
    ended = chat("\n".join([*lines, "/system Rhyme.", "six", "/system off", "/help", "/quit", "never"]))
    assert ended.returncode == 0
    asked = [[m["content"] for m in body["messages"] if m["role"] == "user"] for body in server.bodies]
    assert asked == [
        ["one"],
        ["one", "two"],
        ["one", "three"],
        ["four"],
        ["one", "three", "five"],
        ["one", "three", "five", "six"],
    ]
    assert server.bodies[-1]["messages"][0] == {"role": "system", "content": "Rhyme."}
    assert all(name in ended.stderr for name in COMMANDS)
    assert "no system prompt" in ended.stderr
    assert len(Conversation.from_json(file.read_text()).turns) == 2


def test_figures_go_beside_the_answers(chat: Chat) -> None:
    ended = chat("x\n", "--figures")
    assert ended.stdout == "1: x \x1b[2J \n"
    assert "8 of 9 prompt tokens cached · p0 → d0" in " ".join(ended.stderr.split())


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("busy", "HTTP 429: full; retry in 7 s"),
        ("long", "/undo or /reset makes the conversation shorter"),
        ("error", "the answer is incomplete: a worker fell over"),
        ("cut", "the answer is incomplete: its stream ended"),
    ],
)
def test_the_first_error_ends_a_piped_chat(chat: Chat, server: ChatServer, script: str, said: str) -> None:
    server.script = script
    ended = chat("one\ntwo\n")
    assert (ended.returncode, len(server.bodies)) == (1, 1)
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_wrong_command_ends_a_piped_chat(chat: Chat, server: ChatServer) -> None:
    ended = chat("/sve x\none\n")
    assert (ended.returncode, server.bodies) == (1, [])
    assert "did you mean /save" in ended.stderr


def test_of_the_keys_in_the_variable_the_first_is_sent(chat: Chat, server: ChatServer) -> None:
    server.key = "first"
    assert chat("x\n", MOONPOOL_API_KEY="first, second").returncode == 0
    assert chat("x\n", "--api-key", "first").returncode == 0
    refused = chat("x\n", MOONPOOL_API_KEY="second,first")
    assert (refused.returncode, "wrong key; give the key with --api-key" in refused.stderr) == (1, True)
    server.key = "with,comma"
    assert chat("x\n", "--api-key", "with,comma").returncode == 0


def test_the_key_in_a_file_is_sent_in_place_of_the_variables(chat: Chat, server: ChatServer, tmp_path: Path) -> None:
    server.key = "secret"
    (tmp_path / "key").write_text("secret\n")
    assert chat("x\n", "--api-key-file", str(tmp_path / "key"), MOONPOOL_API_KEY="other").returncode == 0
    assert chat("x\n", MOONPOOL_API_KEY="other").returncode == 1


def test_a_server_that_is_not_there_is_told_with_what_to_do(chat: Chat, server: ChatServer) -> None:
    ended = chat("x\n", "--url", "http://127.0.0.1:1")
    assert ended.returncode == 1
    assert "no usable server at http://127.0.0.1:1" in ended.stderr
    assert "start one with `moonpool serve`" in ended.stderr
    wrong = chat("x\n", "--model", "huge")
    assert (wrong.returncode, "serves 'tiny', not 'huge'" in wrong.stderr) == (1, True)
    bad = chat("x\n", "--url", "ftp://x")
    assert (bad.returncode, "must be http://HOST:PORT" in bad.stderr) == (2, True)


INTERRUPTED_BETWEEN_LOOKS = """
import ctypes
from moonpool.chat.loop import _lines

hook = ctypes.c_void_p.in_dll(ctypes.pythonapi, "PyOS_InputHook")  # called by readline when it is not waiting for keys
hook.value = ctypes.cast(ctypes.pythonapi.PyErr_SetInterrupt, ctypes.c_void_p).value
print("read:", list(_lines(interactive=True)))
"""


def test_ctrl_c_leaves_the_prompt_even_if_it_comes_just_before_readline_waits() -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-c", INTERRUPTED_BETWEEN_LOOKS]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "dumb"})
    os.close(slave)
    try:
        assert process.wait(60) == 0
        assert os.read(master, 1 << 12) == b"> \r\nread: []\r\n"
    finally:
        process.kill()
        process.wait()
        os.close(master)
