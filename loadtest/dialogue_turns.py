"""Turns of dialogues: their plan, their records, and the run of one dialogue.

The plan (texts, lengths, times) is determined by the seed and the dialogue's number. Each question is sent after the
previous answer, which becomes part of the history.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import aiohttp
import numpy as np

from loadtest.client import CompletionClient, cached_tokens_of, delta_text, take_tokens
from loadtest.dialogue_config import DialogueConfig
from loadtest.errors import StreamFailed
from loadtest.http import RetryPolicy
from loadtest.plan import PlannedRequest
from loadtest.record import RequestRecord, SendOutcome
from loadtest.server import ServerInfo
from loadtest.tokens import block_text

_SPREAD = 0.5  # sigma of the logarithm of lengths: a tenth is longer than 1.7 times the mean
_SYSTEM = -1


class Cutter(Protocol):
    """Interface of the tokenizer used by the plan."""

    def cut(self, text: str, num_tokens: int) -> str:
        """Return the first `num_tokens` tokens of a text, as text."""


@dataclass(frozen=True)
class PlannedTurn:
    """One question. `num_tokens`: approximate length of the question; `think_s`: delay after the previous answer."""

    turn: int
    question: str
    num_tokens: int
    max_tokens: int
    think_s: float
    seed: int


def system_text(config: DialogueConfig, cutter: Cutter) -> str:
    """Return the system message of all dialogues, or "" for none."""
    return _text(config.seed, _SYSTEM, config.system_tokens, cutter) if config.system_tokens else ""


def planned_turns(config: DialogueConfig, dialogue: int, cutter: Cutter) -> Iterator[PlannedTurn]:
    """Yield the turns of one dialogue."""
    rng = Random(_number(config.seed, dialogue, "lengths"))
    for turn in range(config.turns):
        num_tokens = _length(rng, config.turn_tokens)
        max_tokens = _length(rng, config.answer_tokens)
        think_s = rng.expovariate(1 / config.think_time_s) if turn and config.think_time_s else 0.0
        yield PlannedTurn(
            turn=turn,
            question=_text(config.seed, dialogue * config.turns + turn, num_tokens, cutter),
            num_tokens=num_tokens,
            max_tokens=max_tokens,
            think_s=think_s,
            seed=_number(config.seed, dialogue, f"turn {turn}") % 2**63,
        )


def _length(rng: Random, mean: int) -> int:
    return max(1, round(rng.lognormvariate(math.log(mean) - _SPREAD**2 / 2, _SPREAD)))


def _text(seed: int, number: int, num_tokens: int, cutter: Cutter) -> str:
    return cutter.cut(block_text(seed, number, num_tokens).strip(), num_tokens)


def _number(seed: int, dialogue: int, what: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{dialogue}:{what}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass
class TurnRecord:
    """Record of one turn.

    `history_tokens`: tokens of the previous turn's prompt and answer whose KV may exist, 0 in the first turn. The
    answer's last token is excluded, because its KV is never computed.
    """

    dialogue: int
    turn: int
    think_s: float
    history_tokens: int
    request: RequestRecord

    @property
    def completed(self) -> bool:
        """True if the answer is complete."""
        return self.request.outcome is SendOutcome.COMPLETED

    @property
    def dropped_messages(self) -> int:
        """Number of messages that the server dropped, 0 if not reported."""
        dropped = self.request.extension.get("dropped_messages", 0)
        return dropped if isinstance(dropped, int) else 0

    def as_json(self) -> dict[str, Any]:
        """Return the record as one line of turns.jsonl."""
        return {
            "dialogue": self.dialogue,
            "turn": self.turn,
            "think_s": round(self.think_s, 6),
            "history_tokens": self.history_tokens,
            "output_tokens": self.request.output_tokens,
            "text": self.request.text,
            **self.request.as_json(),
        }


def share_cached(turns: Sequence[TurnRecord]) -> float | None:
    """Return cached tokens over prompt tokens of completed turns after the first; None if there are none."""
    later = [t.request for t in turns if t.completed and t.turn]
    prompt = sum(r.prompt_tokens for r in later)
    return sum(r.cached_tokens for r in later) / prompt if prompt else None


def share_of_history(turns: Sequence[TurnRecord]) -> float | None:
    """Return cached tokens over reusable tokens of completed turns after the first; None if there are none."""
    later = [t for t in turns if t.completed and t.history_tokens]
    history = sum(min(t.history_tokens, t.request.prompt_tokens) for t in later)
    return sum(t.request.cached_tokens for t in later) / history if history else None


_AROUND_A_TURN = 32


@dataclass(frozen=True)
class Talk:
    """Context shared by all dialogues of a run. `max_model_len` 0: a dialogue ends only when the server rejects it."""

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
class ChatDialect:
    """Dialect of /v1/chat/completions for one turn."""

    messages: tuple[dict[str, str], ...]
    truncation: str
    path: str = "/v1/chat/completions"

    def body(self, request: PlannedRequest, *, model: str, cache_salt: str) -> dict[str, Any]:
        """Return the body of a seeded chat request whose answer includes the prompt's and the answer's token ids."""
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
        """Add the choice's text and tokens; without token ids, an event with text counts as one token."""
        text = delta_text(choice)
        record.text += text
        take_tokens(record, choice.get("token_ids"), now, has_text=bool(text))

    def check(self, record: RequestRecord, usage: dict[str, Any] | None, request: PlannedRequest) -> None:
        """Check that usage is present and consistent with the answer. Raises StreamFailed."""
        if usage is None:
            raise StreamFailed("the answer has no usage")
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not isinstance(prompt, int) or not isinstance(completion, int):
            raise StreamFailed(
                f"usage reports {prompt!r} prompt and {completion!r} completion tokens; expected integers"
            )
        if record.prompt_ids and len(record.prompt_ids) != prompt:
            raise StreamFailed(f"usage reports {prompt} prompt tokens; prompt_token_ids has {len(record.prompt_ids)}")
        if record.token_ids and len(record.token_ids) != completion:
            raise StreamFailed(
                f"usage reports {completion} completion tokens; {len(record.token_ids)} token ids were received"
            )
        record.prompt_tokens, record.output_tokens = prompt, completion
        record.cached_tokens = cached_tokens_of(usage, prompt)


async def talk(common: Talk, dialogue: int, system: str, turns: Iterable[PlannedTurn]) -> None:
    """Run one dialogue to its end or its first failed turn; each turn's record is added when the turn starts.

    All its requests carry one session id.
    """
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
            dialect=ChatDialect(tuple(messages), common.truncation),
            retry=RetryPolicy(),
            headers={"x-session-id": f"{common.cache_salt}-{dialogue}"},
        )
        await client.send(_request(record), record, cache_salt=common.cache_salt)
        if record.outcome is not SendOutcome.COMPLETED:
            return
        messages.append({"role": "assistant", "content": record.text})
        history = record.prompt_tokens + record.output_tokens


def _needed(history: int, planned: PlannedTurn) -> int:
    """Return an upper bound of the turn's prompt and answer tokens; assumes a chat template overhead of 32 tokens."""
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
    """Return the turn as a planned request, with an empty prompt: ChatDialect provides the messages."""
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
