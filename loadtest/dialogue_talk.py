"""One dialogue: every question waits for the answer before it, and every answer becomes history."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from loadtest.client import CompletionClient
from loadtest.dialect import cached_tokens_of, delta_text, take_tokens
from loadtest.dialogue_plan import PlannedTurn
from loadtest.dialogue_record import TurnRecord
from loadtest.errors import StreamFailed
from loadtest.plan import PlannedRequest
from loadtest.record import Outcome, RequestRecord
from loadtest.retry import RetryPolicy
from loadtest.server import ServerInfo

_AROUND_A_TURN = 32


@dataclass(frozen=True)
class Talk:
    """What all dialogues of a run share. `max_model_len` 0: a dialogue is not ended before the server refuses it."""

    session: aiohttp.ClientSession
    server: ServerInfo
    clock: Callable[[], float]
    timeout_s: float
    temperature: float
    truncation: str
    cache_salt: str
    max_model_len: int
    records: list[TurnRecord] = field(default_factory=list)


@dataclass(frozen=True)
class ChatTurn:
    """/v1/chat/completions, for one turn: a dialect of the client's."""

    messages: tuple[dict[str, str], ...]
    truncation: str
    path: str = "/v1/chat/completions"

    def body(self, request: PlannedRequest, *, model: str, cache_salt: str) -> dict[str, Any]:
        """A seeded chat that tells the ids of its prompt and of its answer."""
        body: dict[str, Any] = {
            "model": model,
            "messages": list(self.messages),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if cache_salt:
            body["cache_salt"] = cache_salt
        if self.truncation != "disabled":
            body["truncation"] = self.truncation
        return body

    def take_choice(self, choice: dict[str, Any], now: float, record: RequestRecord, request: PlannedRequest) -> None:
        """Text, and tokens by their ids; where the server gives none, an event with text counts as one token."""
        text = delta_text(choice)
        record.text += text
        take_tokens(record, choice.get("token_ids"), now, has_text=bool(text))

    def check(self, record: RequestRecord, usage: dict[str, Any] | None, request: PlannedRequest) -> None:
        """Usage must be there, and agree with what came."""
        if usage is None:
            raise StreamFailed("the answer came without usage")
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not isinstance(prompt, int) or not isinstance(completion, int):
            raise StreamFailed(f"usage says {prompt!r} prompt and {completion!r} completion tokens")
        if record.prompt_ids and len(record.prompt_ids) != prompt:
            raise StreamFailed(f"usage says {prompt} prompt tokens; prompt_token_ids has {len(record.prompt_ids)}")
        if record.token_ids and len(record.token_ids) != completion:
            raise StreamFailed(f"usage says {completion} completion tokens; {len(record.token_ids)} token ids came")
        record.prompt_tokens, record.output_tokens = prompt, completion
        record.cached_tokens = cached_tokens_of(usage, prompt)


async def talk(common: Talk, dialogue: int, system: str, turns: Iterable[PlannedTurn]) -> None:
    """Lead one dialogue to its end, or to its first turn that fails; each turn's record is added as it begins."""
    messages = [{"role": "system", "content": system}] if system else []
    history = 0
    for planned in turns:
        if common.truncation == "disabled" and 0 < common.max_model_len < _needed(history, planned):
            return
        await asyncio.sleep(planned.think_s)
        messages.append({"role": "user", "content": planned.question})
        record = _record(common, planned)
        common.records.append(TurnRecord(dialogue, planned.turn, planned.think_s, max(0, history - 1), record))
        client = CompletionClient(
            common.session,
            common.server,
            timeout_s=common.timeout_s,
            clock=common.clock,
            dialect=ChatTurn(tuple(messages), common.truncation),
            retry=RetryPolicy(),
        )
        await client.send(_request(record), record, cache_salt=common.cache_salt)
        if record.outcome is not Outcome.COMPLETED:
            return
        messages.append({"role": "assistant", "content": record.text})
        history = record.prompt_tokens + record.output_tokens


def _needed(history: int, planned: PlannedTurn) -> int:
    """Tokens of the turn's prompt and answer at most, but for templates that put more around a message."""
    return history + planned.num_tokens + _AROUND_A_TURN + planned.max_tokens if history else 0


def _record(common: Talk, planned: PlannedTurn) -> RequestRecord:
    return RequestRecord(
        index=len(common.records),
        due_s=common.clock(),
        prompt_tokens=0,
        max_tokens=planned.max_tokens,
        temperature=common.temperature,
        seed=planned.seed,
    )


def _request(record: RequestRecord) -> PlannedRequest:
    """The client's view of a turn: its prompt is the dialect's to write."""
    return PlannedRequest(
        index=record.index,
        arrival_s=record.due_s,
        prompt=np.zeros(0, np.int32),
        block_ids=(),
        max_tokens=record.max_tokens,
        temperature=record.temperature,
        seed=record.seed,
        overlong=False,
    )
