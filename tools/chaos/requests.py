"""The mixed load: requests of its clients, drawn from a seed, and their answers. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

WORDS = (
    "river",
    "stone",
    "light",
    "window",
    "garden",
    "winter",
    "silver",
    "letter",
    "bridge",
    "sailor",
    "mountain",
    "copper",
    "candle",
    "market",
    "forest",
    "harbour",
    "thunder",
    "meadow",
    "lantern",
    "orchard",
    "compass",
    "pepper",
    "island",
    "marble",
    "shadow",
    "velvet",
    "anchor",
    "falcon",
    "ribbon",
    "cellar",
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Grace", "Edsger"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["x", "yz", "w"]}, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
FIRST_TEXT_ID, TEXT_IDS = 16, 2000


class Form(StrEnum):
    """Forms of requests in the load."""

    COMPLETION = "completion"
    WHOLE = "not_streamed"
    CHAT = "chat"
    STRUCTURED = "structured"
    TOOLS = "tools"
    LONG = "long_prompt"
    SLOW_READER = "slow_reader"
    CANCELLED = "cancelled"
    SEVERAL = "several_answers"


WEIGHTS = {
    Form.COMPLETION: 4,
    Form.WHOLE: 2,
    Form.CHAT: 4,
    Form.STRUCTURED: 2,
    Form.TOOLS: 2,
    Form.LONG: 2,
    Form.SLOW_READER: 2,
    Form.CANCELLED: 2,
    Form.SEVERAL: 1,
}


@dataclass
class Choice:
    """One answer as received. `finish` is "" while it has not ended."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    arguments: list[str] = field(default_factory=list)  # of tool calls
    finish: str = ""


@dataclass
class Received:
    """Content of one attempt's answers."""

    prompt_ids: list[int] = field(default_factory=list)
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    moonpool: dict[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices.values())


@dataclass
class ClientAttempt:
    """One HTTP request. `outcome`: completed, cancelled, refused (no connection), broken (ended without a finish
    reason), hung (nothing came for too long), or the code of a named error."""

    frontend: int
    began_s: float
    ended_s: float = 0.0
    outcome: str = ""
    detail: str = ""
    received: Received = field(default_factory=Received)


@dataclass
class ClientRequest:
    """One request of a client, with all its attempts. `outcome`: completed, cancelled or lost."""

    number: int
    form: Form
    model: str
    body: dict[str, Any]
    attempts: list[ClientAttempt] = field(default_factory=list)
    outcome: str = ""
    why: str = ""

    @property
    def is_chat(self) -> bool:
        """True for requests to /v1/chat/completions."""
        return "messages" in self.body

    @property
    def num_choices(self) -> int:
        """Number of answers asked for."""
        return int(self.body.get("n", 1))

    @property
    def cancels_after(self) -> int:
        """Number of tokens after which the client leaves; 0: it stays."""
        return 3 + self.body["seed"] % 20 if self.form == Form.CANCELLED else 0


class Script:
    """Requests of one client, one after the other. `ask` takes the conversation's last answer, if any."""

    def __init__(self, seed: str, model: str) -> None:
        self._rng = random.Random(seed)
        self._model = model
        self._number = 0
        self._messages: list[dict[str, str]] = []
        self._shared = self._ids(160)  # a prefix that several prompts begin with

    def ask(self, last_text: str) -> ClientRequest:
        """Return the next request; `last_text` is the answer to the preceding one."""
        rng, self._number = self._rng, self._number + 1
        form = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if self._messages and len(self._messages) < 6:
            form = Form.CHAT
        body: dict[str, Any] = {"model": self._model, "seed": rng.randrange(1 << 30), "return_token_ids": True}
        body |= {"temperature": rng.choice([0.0, 0.8, 1.0]), "max_tokens": rng.randrange(16, 72)}
        if form == Form.CHAT:
            if self._messages:
                self._messages.append({"role": "assistant", "content": last_text})
            self._messages.append({"role": "user", "content": self._sentence()})
            body |= {"messages": list(self._messages), "ignore_eos": True}
            if len(self._messages) >= 6:
                self._messages = []
        elif form == Form.STRUCTURED:
            schema = {"type": "json_schema", "json_schema": {"name": "facts", "schema": SCHEMA}}
            body |= {"messages": self._single(), "response_format": schema, "max_tokens": 160}
        elif form == Form.TOOLS:
            body |= {"messages": self._single(), "tools": TOOLS, "tool_choice": "required", "max_tokens": 400}
            body["parallel_tool_calls"] = False
        else:
            body |= {"prompt": self._prompt(form), "ignore_eos": True}
        if form == Form.SLOW_READER:
            body["max_tokens"] = 120
        elif form == Form.LONG:
            body["max_tokens"] = 12
        elif form == Form.SEVERAL:
            body["n"] = 2 + rng.randrange(2)
        if form != Form.WHOLE:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return ClientRequest(self._number, form, self._model, body)

    def _prompt(self, form: Form) -> list[int]:
        if form == Form.LONG:
            return self._ids(700 + self._rng.randrange(500))
        if self._rng.random() < 0.5:
            return self._shared[: 8 * self._rng.randrange(4, 20)] + self._ids(self._rng.randrange(4, 40))
        return self._ids(self._rng.randrange(20, 200))

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(FIRST_TEXT_ID, TEXT_IDS) for _ in range(count)]

    def _sentence(self) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._rng.randrange(8, 40))) + "?"

    def _single(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self._sentence()}]


def take(received: Received, event: dict[str, Any]) -> None:
    """Add a streamed event, or a whole answer, to what was received."""
    received.prompt_ids = event.get("prompt_token_ids") or received.prompt_ids
    received.usage = event.get("usage") or received.usage
    received.moonpool = event.get("moonpool") or received.moonpool
    for item in event.get("choices", ()):
        choice = received.choices.setdefault(item["index"], Choice())
        received.prompt_ids = item.get("prompt_token_ids") or received.prompt_ids
        choice.token_ids += item.get("token_ids") or []
        choice.finish = item.get("finish_reason") or choice.finish
        message = item.get("delta") or item.get("message") or {"content": item.get("text")}
        choice.text += message.get("content") or ""
        for call in message.get("tool_calls") or ():
            if call.get("index", 0) >= len(choice.arguments):
                choice.arguments.append("")
            choice.arguments[call.get("index", 0)] += call["function"].get("arguments") or ""


def is_complete(request: ClientRequest, received: Received) -> bool:
    """Return True if every answer has its finish reason."""
    ended: Sequence[Choice] = [choice for choice in received.choices.values() if choice.finish]
    return len(ended) == request.num_choices
