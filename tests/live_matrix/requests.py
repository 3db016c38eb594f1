"""The nine kinds of requests of the live matrix, as bodies of the HTTP API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from tools.chaos.requests import TOOLS, WORDS

Body = dict[str, Any]

COPIES = 2  # of each request: one on each of two workers
STOP_ID = 5
ENDLESS = {"sinks": 4, "window": 256}
SAMPLED: Body = {"temperature": 0.8, "top_p": 0.95, "seed": 1234}
GREEDY: Body = {"temperature": 0.0}
PENALTIES: Body = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4}
TOKENS_PER_ITEM = 16  # of the arrays below, about
TAIL_TOKENS = 20  # that follow a sibling's context


class Kind(StrEnum):
    """Rows of the matrix."""

    GREEDY = "greedy"
    SEEDED = "seeded"
    PENALTIES = "penalties"
    GRAMMAR = "grammar"
    TOOLS = "tools"
    SEVERAL = "n > 1"
    LOGPROBS = "log-probabilities"
    ENDLESS = "endless"
    SIBLING = "sibling"


class Phase(StrEnum):
    """Phase in which a fault finds a request: ANSWERING has a long answer, ARRIVING a long prompt."""

    ANSWERING = "answering"
    ARRIVING = "arriving"


@dataclass(frozen=True)
class Sizes:
    """Tokens of the requests of an engine."""

    answer: int
    prompt: int
    context: int  # of answering requests that reuse a sibling's KV
    arriving_prompt: int


@dataclass(frozen=True)
class Asked:
    """One request. `context`: the beginning of its prompt that a sibling computes in advance; empty: none does."""

    kind: Kind
    phase: Phase
    copy: int
    path: str
    body: Body
    context: Sequence[int] = ()

    @property
    def name(self) -> str:
        """Name that is unique in a matrix."""
        return f"{self.kind}, {self.phase} {self.copy}"


def requests_of(kind: Kind, sizes: Sizes) -> list[Asked]:
    """Return the requests of a kind, in both phases."""
    return [_request(kind, phase, copy, sizes) for phase in Phase for copy in range(COPIES)]


def storing(asked: Asked) -> Asked:
    """Return a request after which the pools have KV of this one's prompt. What an endless one computes is not stored
    once its window has slid, so a short one takes its place."""
    if asked.kind != Kind.ENDLESS:
        return asked
    prompt = asked.body["prompt"][: ENDLESS["window"] // 2]
    return replace(asked, body=GREEDY | {"prompt": prompt, "max_tokens": 1})


def _request(kind: Kind, phase: Phase, copy: int, sizes: Sizes) -> Asked:
    seed = 100 * list(Kind).index(kind) + 10 * list(Phase).index(phase) + copy
    rng = np.random.default_rng(seed)
    is_long = phase == Phase.ANSWERING
    answer = sizes.answer if is_long else 16
    length = sizes.prompt + 7 * copy if is_long else sizes.arriving_prompt + 7 * copy
    if kind in (Kind.GRAMMAR, Kind.TOOLS):
        text = " ".join(rng.choice(WORDS, length // 3))
        body = _held_to_a_grammar(kind, answer, is_long=is_long) | {"messages": [{"role": "user", "content": text}]}
        return Asked(kind, phase, copy, "/v1/chat/completions", body)
    context: list[int] = []
    if kind == Kind.SIBLING:
        context = rng.integers(16, 2000, sizes.context if is_long else sizes.arriving_prompt).tolist()
        length = TAIL_TOKENS
    body = {"prompt": [*context, *rng.integers(16, 2000, length).tolist()]} | _free(kind, answer)
    return Asked(kind, phase, copy, "/v1/completions", body, context)


def _free(kind: Kind, answer: int) -> Body:
    """Return the options of a completion that no grammar ends."""
    if kind == Kind.ENDLESS:  # it ends by the bias as soon as its end is allowed
        ended = {"stop_token_ids": [STOP_ID], "logit_bias": {str(STOP_ID): 100}, "min_tokens": answer}
        return GREEDY | {"endless": ENDLESS, "ignore_eos": True} | ended
    options: dict[Kind, Body] = {
        Kind.SEEDED: SAMPLED,
        Kind.PENALTIES: SAMPLED | PENALTIES,
        Kind.SEVERAL: SAMPLED | {"n": 3},
        Kind.LOGPROBS: SAMPLED | {"logprobs": 3},
    }
    return {"max_tokens": answer, "ignore_eos": True} | options.get(kind, GREEDY)


def _held_to_a_grammar(kind: Kind, answer: int, *, is_long: bool) -> Body:
    """Return the options of a chat whose answer has about `answer` tokens because its grammar says so."""
    word = {"type": "string", "pattern": "^[a-z]{4,9}$"}
    items = answer // TOKENS_PER_ITEM
    words = {"type": "array", "items": word, "minItems": items, "maxItems": items}
    schema = {
        "type": "object",
        "properties": {"words": words},
        "required": ["words"],
        "additionalProperties": False,
    }
    common: Body = SAMPLED | {"max_tokens": 4 * answer + 40}
    if kind == Kind.GRAMMAR:
        held = {"type": "json_schema", "json_schema": {"name": "words", "schema": schema}}
        return common | {"response_format": held}
    tools = [{"type": "function", "function": {"name": "note", "parameters": schema}}] if is_long else TOOLS
    return common | {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
