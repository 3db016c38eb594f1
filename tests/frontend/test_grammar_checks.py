"""Hostile grammars at a frontend: what other tenants experience, and what is left when their sender has gone."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from frontend import grammars
from moonpool_proto.v1 import worker_pb2
from tools.attacks.bombs import schema_bomb
from worker.fair_queue import MAX_RUNNING_PER_TENANT, MAX_WAITING_PER_TENANT
from worker.grammar_processes import FRONTEND_LIMITS, GrammarProcesses, GrammarSource

WAIT_S = 60.0


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    entries = [
        {"name": name, "hash": "sha256:" + hashlib.sha256(name.encode()).hexdigest(), "tenant": name}
        for name in ("attacker", "victim")
    ]
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": entries}))
    return path


@pytest.fixture
async def front(start_front: Any, cluster: Any, keys: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    # Other tests may take most of the machine: only CPU time counts.
    monkeypatch.setattr(grammars, "FRONTEND_LIMITS", replace(FRONTEND_LIMITS, wall_s=WAIT_S))
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
    async with start_front(api_keys_file=keys) as running:
        yield running


async def post(front: Any, tenant: str, path: str = "/v1/completions", **fields: Any) -> tuple[int, Any]:
    body = {"max_tokens": 1} | ({"prompt": "a"} if "messages" not in fields else {}) | fields
    headers = {"authorization": f"Bearer {tenant}"}
    async with front.http.post(front.url + path, json=body, headers=headers) as response:
        return response.status, await response.json()


def bombs_at_work() -> list[psutil.Process]:
    """The grammar processes of this test that have used CPU time."""
    return [
        child
        for template in psutil.Process().children()
        for child in template.children()
        if "grammar_child" in " ".join(child.cmdline()) and sum(child.cpu_times()[:2]) > 0.2
    ]


async def test_a_tenant_s_bombs_delay_no_other_tenant(front: Any, until: Any) -> None:
    before = psutil.Process().memory_info().rss
    bombs = [asyncio.create_task(post(front, "attacker", guided_json=schema_bomb(24, i))) for i in range(6)]

    async def look() -> list[psutil.Process]:
        return await asyncio.to_thread(bombs_at_work)

    await until(look, bool)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for fields in (
        {},
        {"guided_regex": "a+b"},
        {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "path": "/v1/chat/completions"},
    ):
        status, body = await post(front, "victim", **fields)
        assert status == 200, body
    assert sum(bomb.done() for bomb in bombs) < len(bombs)
    for bomb in bombs:
        status, body = await bomb
        assert (status, body["error"]["param"]) == (400, "guided_json")
        assert "1 s of CPU time" in body["error"]["message"]
    assert psutil.Process().memory_info().rss - before < 64 << 20
    status, body = await post(front, "victim", guided_json=schema_bomb(24, 0))
    assert (status, "without another attempt" in body["error"]["message"]) == (400, True)
    await front.has_counted("moonpool:http_grammars_refused_total", len(bombs) + 1)
    await front.has_counted("moonpool:http_grammar_processes_killed_total", len(bombs))


async def test_the_check_of_a_client_that_has_gone_ends(
    start_front: Any, cluster: Any, keys: Path, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "FRONTEND_LIMITS", replace(FRONTEND_LIMITS, cpu_s=100, wall_s=100))
    async with start_front(api_keys_file=keys) as front:
        await leave(front, until)


async def leave(front: Any, until: Any) -> None:
    leaving = asyncio.create_task(post(front, "attacker", guided_json=schema_bomb(26, 0)))

    async def look() -> list[psutil.Process]:
        return await asyncio.to_thread(bombs_at_work)

    (bomb,) = await until(look, bool)
    leaving.cancel()
    await until(lambda: asyncio.to_thread(bomb.is_running), lambda runs: not runs)
    await front.quiet()


async def test_more_checks_than_may_wait_are_told_to_come_back(front: Any, until: Any) -> None:
    total = MAX_RUNNING_PER_TENANT + MAX_WAITING_PER_TENANT
    bombs = [asyncio.create_task(post(front, "attacker", guided_json=schema_bomb(26, i))) for i in range(total + 5)]
    done, _ = await asyncio.wait(bombs, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
    status, body = done.pop().result()
    assert (status, body["error"]["code"]) == (429, "grammar_checks")
    for bomb in bombs:
        bomb.cancel()
    await asyncio.gather(*bombs, return_exceptions=True)


async def test_a_verdict_is_kept(front: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    real = GrammarProcesses.check

    def counted(self: GrammarProcesses, tenant: str, grammar: GrammarSource) -> Any:
        checked.append(grammar.source)
        return real(self, tenant, grammar)

    monkeypatch.setattr(GrammarProcesses, "check", counted)
    for _ in range(3):
        assert (await post(front, "victim", guided_regex="a+"))[0] == 200
        assert (await post(front, "victim", guided_regex="(("))[0] == 400
    assert checked == ["a+", "(("]


def tools(count: int, padding: int = 0) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {"a": {"enum": ["x" * padding]}}}
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(count)]


async def test_tools_are_checked_at_once_after_their_total_size(front: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    real = GrammarProcesses.check

    def counted(self: GrammarProcesses, tenant: str, grammar: GrammarSource) -> Any:
        checked.append(len(grammar.parts))
        return real(self, tenant, grammar)

    monkeypatch.setattr(GrammarProcesses, "check", counted)
    chat = {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "a"}]}
    _, body = await post(front, "victim", tools=tools(128), **chat)
    assert body["error"]["code"] == "context_length_exceeded"  # which is looked at once the grammar has passed
    assert checked == [128]
    status, body = await post(front, "victim", tools=tools(128, padding=2000), **chat)
    assert (status, body["error"]["param"]) == (400, "tools")
    assert "at most 131072 bytes" in body["error"]["message"]
    assert checked == [128]
    bad = [*tools(3), {"type": "function", "function": {"name": "bad", "parameters": {"$ref": "#/no"}}}]
    status, body = await post(front, "victim", tools=bad, **chat)
    assert (status, body["error"]["param"]) == (400, "tools")
    assert "function.parameters of 'bad' (tool 3)" in body["error"]["message"]
