"""FuzzTarget: the load test's parser of a server's answers, which may be any server's."""

import json
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from loadtest.bench.dialects import BenchDialect
from loadtest.client import Dialect, TokenIdCompletions, take_event
from loadtest.errors import ReplayError
from loadtest.http import SseParser
from loadtest.plan import PlannedRequest
from loadtest.record import RequestRecord
from loadtest.server import error_message
from tools.fuzz import mutation
from tools.fuzz.target import FuzzTarget, Misjudged

_REQUEST = PlannedRequest(0, 0.0, np.array([5, 6, 7], np.int32), (), 2, 0.0, 1, False)
_DIALECTS: tuple[Dialect, ...] = (
    TokenIdCompletions(),
    BenchDialect("/v1/completions", False, True, keep_text=True),
    BenchDialect("/v1/chat/completions", True, False),
)


class EventStream(FuzzTarget):
    """Streams of server-sent events. The first byte selects the dialect and how the stream is cut into chunks."""

    name = "sse"
    covers: tuple[str, ...] = ("loadtest/http.py", "loadtest/client.py", "loadtest/bench/dialects.py")
    allowed: tuple[type[BaseException], ...] = (ReplayError,)
    tokens: tuple[bytes, ...] = (
        b"data: ",
        b"\n\n",
        b"\r\n",
        b"[DONE]",
        b":",
        b"event: x\n",
        b'"usage"',
        b'"choices"',
        b"null",
        b"\xff",
    )
    _words = (
        "choices", "usage", "token_ids", "text", "delta", "content", "prompt_tokens", "completion_tokens",
        "prompt_tokens_details", "cached_tokens", "prompt_token_ids", "moonpool", "error", "message", "index", 2, 3,
    )  # fmt: skip

    def seeds(self) -> Sequence[bytes]:
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
        ids = {"choices": [{"index": 0, "text": "a", "token_ids": [1, 2], "prompt_token_ids": [5, 6, 7]}]}
        delta = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "a"}}], "moonpool": {"a": 1}}
        return (
            b"\0" + _stream(ids, {"choices": [], "usage": usage}),
            b"\1" + _stream({"choices": [{"text": "a"}], "prompt_token_ids": [5]}, {"choices": [], "usage": usage}),
            b"\2" + _stream(delta, {"choices": [], "usage": usage}),
        )

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate one event as JSON, or bytes."""
        lines = case[1:].split(b"\n")
        events = [at for at, line in enumerate(lines) if line.startswith(b"data: {")]
        if not events or rng.random() < 0.3:
            return mutation.mutate_bytes(rng, case, other, self.tokens)
        at = rng.choice(events)
        lines[at] = b"data: " + mutation.mutate_json(rng, lines[at][6:], lines[events[0]][6:], self.tokens, self._words)
        return bytes([rng.randrange(256)]) + b"\n".join(lines)

    def run(self, case: bytes) -> None:
        """Follow the stream as the client does, and use the record's figures."""
        control, data = (case[0], case[1:]) if case else (0, b"")
        dialect, step = _DIALECTS[control % 3], (1 << 30, 1 << 30, 7, 1)[control // 3 % 4]
        error_message(data[:4096].decode("utf-8", "replace"))
        record = RequestRecord(0, 0.0, 3, 2, 0.0, 1, sent_s=0.0)
        parser, usage = SseParser(), None
        for start in range(0, min(len(data), 20_000 * step), step):
            for event in parser.feed(data[start : start + step]):
                if event == "[DONE]":
                    dialect.check(record, usage, _REQUEST)
                    _judge(record)
                    return
                usage = take_event(event, 1.0, record, _REQUEST, dialect) or usage


def _judge(record: RequestRecord) -> None:
    if not all(type(count) is int and count >= 0 for count in (record.output_tokens, record.cached_tokens)):
        raise Misjudged("a token count is not an integer")
    if not math.isnan(record.ttft_s):
        _ = record.intervals_s
    json.dumps(record.text)


def _stream(*events: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
