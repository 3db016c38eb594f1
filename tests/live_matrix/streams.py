"""Streamed answers, as a client receives and compares them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from tests.live_matrix.requests import Asked

TOLERANCE = 1e-3  # of log-probabilities
ENDS_WITHIN_S = 240.0


@dataclass
class Choice:
    """One of the answers to a request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name and arguments of each
    logprob_tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of each token and, in order, of the likeliest in its place
    finish_reason: str = ""

    def take(self, item: dict[str, Any]) -> None:
        """Add what an event says about the choice."""
        self.token_ids += item.get("token_ids") or []
        self.finish_reason = item.get("finish_reason") or self.finish_reason
        delta = item.get("delta") or {"content": item.get("text")}
        self.text += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            while call["index"] >= len(self.calls):
                self.calls.append(["", ""])
            function = call["function"]
            self.calls[call["index"]][0] += function.get("name") or ""
            self.calls[call["index"]][1] += function.get("arguments") or ""
        if scores := item.get("logprobs"):
            self.logprob_tokens += scores["tokens"]
            for own, likeliest in zip(scores["token_logprobs"], scores["top_logprobs"], strict=True):
                self.logprobs += [own, *sorted(likeliest.values())]

    def difference(self, other: Choice) -> str:
        """Return where the other choice differs first; "" if it does not."""
        for name in ("token_ids", "logprob_tokens", "logprobs"):
            mine, others = getattr(self, name), getattr(other, name)
            slack = TOLERANCE if name == "logprobs" else 0
            for at, (one, two) in enumerate(zip(mine, others, strict=False)):
                if not (one == two or (slack and abs(one - two) <= slack)):
                    return f"{name}[{at}] is {two}, expected {one}"
            if len(mine) != len(others):
                return f"{len(others)} {name}, expected {len(mine)}"
        for name in ("text", "calls", "finish_reason"):
            if (mine := getattr(self, name)) != (others := getattr(other, name)):
                return f"{name} is {str(others)[-80:]!r}, expected {str(mine)[-80:]!r}"
        return ""


@dataclass
class Answer:
    """All choices of a request, or the code of the error that refused or ended it."""

    choices: dict[int, Choice] = field(default_factory=dict)
    error: str = ""
    facts: list[dict[str, Any]] = field(default_factory=list)  # the answer's `moonpool`, of each choice

    @property
    def num_tokens(self) -> int:
        """Tokens of the choice that has the fewest."""
        return min((len(choice.token_ids) for choice in self.choices.values()), default=0)

    @property
    def attempts(self) -> int:
        """Number of times that the frontend placed the choice that was placed most often."""
        return max((int(facts["attempts"]) for facts in self.facts), default=0)

    @property
    def sibling_tokens(self) -> int:
        """Tokens of the prompt whose KV a sibling computed."""
        return max((int(facts["sibling_tokens"]) for facts in self.facts), default=0)

    @property
    def recomputed_blocks(self) -> int:
        """Blocks that were to be reused and had to be computed, in all attempts of all choices."""
        sources = [attempt["kv"] for facts in self.facts for attempt in facts["receipt"]["attempts"]]
        return sum(int(kv["recomputed_blocks"]) for kv in sources if kv is not None)

    def difference(self, other: Answer) -> str:
        """Return where the other answer differs first; "" if it does not."""
        if self.error != other.error:
            return f"error {other.error!r}, expected {self.error!r}"
        if self.choices.keys() != other.choices.keys():
            return f"choices {sorted(other.choices)}, expected {sorted(self.choices)}"
        found = ((index, mine.difference(other.choices[index])) for index, mine in self.choices.items())
        return next((f"choice {index}: {text}" for index, text in found if text), "")


@pytest.fixture
async def clients() -> AsyncIterator[aiohttp.ClientSession]:
    """Session of clients that wait for as long as it takes, each on a connection of its own."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        yield session


class Stream:
    """A client that streams one answer. If its connection breaks it asks again, as often as `may_ask_again` permits."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, asked: Asked, options: dict[str, Any], *, may_ask_again: int = 0
    ) -> None:
        """`options`: further fields of the body, such as the model."""
        self.asked = asked
        self.answer = Answer()
        self.num_breaks = 0
        self.lost = ""  # why there is no answer
        self._may_ask_again = may_ask_again
        self._news = asyncio.Event()
        view = {"stream": True, "return_token_ids": True, "return_receipt": True}
        self._url, self._body = url + asked.path, asked.body | options | view
        self.task = asyncio.create_task(self._ask(session))

    @property
    def is_over(self) -> bool:
        """True if the answer has ended, however."""
        return self.task.done()

    async def reach(self, count: int) -> None:
        """Wait until every choice has `count` tokens, or the answer has ended."""
        choices = self.asked.body.get("n", 1)
        while not self.is_over and (len(self.answer.choices) < choices or self.answer.num_tokens < count):
            self._news.clear()
            await self._news.wait()

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        try:
            async with asyncio.timeout(ENDS_WITHIN_S):
                while True:
                    try:
                        await self._read(session)
                    except (aiohttp.ClientError, ConnectionError) as error:
                        self.num_breaks += 1
                        if self.num_breaks > self._may_ask_again:
                            self.lost = f"the connection broke: {error!r}"
                            return
                        self.answer = Answer()
                    else:
                        return
        except TimeoutError:
            tokens = {index: len(choice.token_ids) for index, choice in self.answer.choices.items()}
            self.lost = f"no end within {ENDS_WITHIN_S:g} s; tokens by choice: {tokens}"
        finally:
            self._news.set()

    async def _read(self, session: aiohttp.ClientSession) -> None:
        answer = self.answer
        async with session.post(self._url, json=self._body) as response:
            if response.status != 200:
                answer.error = _code(await response.json())
                return
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    answer.error = _code(event)
                    return
                for item in event.get("choices", ()):
                    answer.choices.setdefault(item["index"], Choice()).take(item)
                if (facts := event.get("moonpool")) is not None:
                    answer.facts = facts if isinstance(facts, list) else [facts]
                self._news.set()
        if not answer.facts:
            raise ConnectionError("the stream ended before the answer did")


def _code(answer: dict[str, Any]) -> str:
    error = answer["error"]
    return str(error.get("code") or error.get("type"))


async def all_ended(streams: Sequence[Stream]) -> None:
    """Wait for the end of all streams."""
    await asyncio.gather(*(stream.task for stream in streams))
