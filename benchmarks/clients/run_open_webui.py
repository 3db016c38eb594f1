"""Requests as Open WebUI sends them: its models list, streamed chats with usage and tools, and its background tasks.

Open WebUI itself is not installed: the bodies and headers are those that its backend
(`backend/open_webui/routers/openai.py` and `tasks.py`) sends, and, for direct connections, its page.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from benchmarks.clients.checks import checked, require
from benchmarks.clients.comparison import Row
from benchmarks.clients.context import Context
from benchmarks.clients.run_openai import ANSWER, CHAT, TIMEOUT_S, TOOL

ORIGIN = "http://localhost:3000"
HEADERS = {
    "Authorization": "Bearer any",
    "HTTP-Referer": "https://openwebui.com/",
    "X-Title": "Open WebUI",
    "X-OpenWebUI-User-Name": "User",
    "X-OpenWebUI-Chat-Id": "5d0f3b4e",
}
_TASK = """### Task:
{task}
### Output:
JSON format: {form}
### Chat History:
<chat_history>
{history}
</chat_history>"""


def run_open_webui(context: Context) -> list[Row]:
    """Run all checks; a failed one is a row with the reason."""
    return asyncio.run(_run(context))


async def _run(context: Context) -> list[Row]:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(headers=HEADERS, timeout=timeout) as http:
        checks = OpenWebUIChecks(http, context)
        return [await checked("open-webui", name, check) for name, check in checks.all().items()]


class OpenWebUIChecks:
    """The checks; each method returns a short description of the result or raises WrongResult."""

    def __init__(self, http: aiohttp.ClientSession, context: Context) -> None:
        self._http, self._url, self._model = http, f"{context.url}/v1", context.name

    def all(self) -> dict[str, Callable[[], Awaitable[str]]]:
        """Return the checks by name."""
        return {
            "models": self.models,
            "chat, streamed with usage": self.chat,
            "native tool calls, and their results": self.tools,
            "title and tags, in the background": self.tasks,
            "an image is refused with a reason": self.image,
            "direct connection of its page (CORS)": self.direct,
        }

    async def models(self) -> str:
        async with self._http.get(f"{self._url}/models") as response:
            names = [card["id"] for card in (await response.json())["data"]]
        require(self._model in names, f"the served model is not in {names}")
        return ", ".join(names)

    async def chat(self) -> str:
        system = {"role": "system", "content": "User Context:\n\n"}
        chunks = await self._streamed(messages=CHAT, temperature=0)
        text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
        require(text == ANSWER, f"it said {text!r}")
        require(chunks[-1]["usage"]["completion_tokens"] > 0, f"no usage in {chunks[-1]}")
        await self._streamed(messages=[system, *CHAT], max_tokens=8)
        return f"{len(chunks)} chunks"

    async def tools(self) -> str:
        chunks = await self._streamed(messages=CHAT, tools=[TOOL], tool_choice="required", max_tokens=64)
        calls: dict[int, dict[str, Any]] = {}
        for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
            for piece in delta.get("tool_calls", ()):  # merged by index, as its middleware does
                call = calls.setdefault(piece["index"], {"id": "", "function": {"name": "", "arguments": ""}})
                call["id"] += piece.get("id") or ""
                for key in ("name", "arguments"):
                    call["function"][key] += piece["function"].get(key) or ""
        (call,) = calls.values()
        json.loads(call["function"]["arguments"])
        turn = {"role": "assistant", "content": "", "tool_calls": [{**call, "type": "function", "index": 0}]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "Remembered."}
        await self._streamed(messages=[*CHAT, turn, result], tools=[TOOL], max_tokens=8)
        return f"{call['function']['name']}({call['function']['arguments']})"

    async def tasks(self) -> str:
        history = "\n".join(f"{message['role'].upper()}: {message['content']}" for message in CHAT)
        tasks = {
            "Generate a concise, 3-5 word title with an emoji summarizing the chat history.": '{ "title": "…" }',
            "Generate 1-3 broad tags categorizing the main themes of the chat history.": '{ "tags": ["a", "b"] }',
        }
        for task, form in tasks.items():
            content = _TASK.format(task=task, form=form, history=history)
            body = {"model": self._model, "messages": [{"role": "user", "content": content}], "stream": False}
            async with self._http.post(
                f"{self._url}/chat/completions", json={**body, "max_completion_tokens": 1000}
            ) as response:
                done = await response.json()
                require(response.status == 200, f"{response.status}: {done}")
                require(isinstance(done["choices"][0]["message"]["content"], str), f"{done}")
        return f"{len(tasks)} tasks"

    async def image(self) -> str:
        parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
        body = {"model": self._model, "messages": [{"role": "user", "content": parts}], "stream": True}
        async with self._http.post(f"{self._url}/chat/completions", json=body) as response:
            error = (await response.json())["error"]["message"]
        require(response.status == 400 and "image_url" in error, f"{response.status}: {error}")
        return str(error)[:60]

    async def direct(self) -> str:
        asked = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        async with self._http.options(f"{self._url}/chat/completions", headers={"Origin": ORIGIN, **asked}) as response:
            allowed = response.headers.get("access-control-allow-origin")
        require(response.status == 200 and allowed == ORIGIN, f"{response.status}, allowed origin {allowed}")
        async with self._http.get(f"{self._url}/models", headers={"Origin": ORIGIN}) as response:
            allowed = response.headers.get("access-control-allow-origin")
        require(allowed == ORIGIN, f"allowed origin {allowed}")
        return ORIGIN

    async def _streamed(self, **fields: Any) -> list[dict[str, Any]]:
        """Return the chunks of a chat that is streamed as Open WebUI asks for it."""
        body = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}, **fields}
        async with self._http.post(f"{self._url}/chat/completions", json=body) as response:
            text = await response.text()
        require(response.status == 200, f"{response.status}: {text[:160]}")
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        require(events[-1] == "[DONE]", f"the last event is {events[-1]}")
        return [json.loads(event) for event in events[:-1]]
