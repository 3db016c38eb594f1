"""Targets: JSON schemas, regular expressions and Lark grammars of requests, through the processes that handle them.

A case is checked as the frontend checks it, in a process with its limits. Some accepted ones are compiled as a worker
does, in another process, and followed for a few tokens. The rules that precede the library also run in the fuzzer's
process, for coverage; both must agree.
"""

import asyncio
import json
import random
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.config import read_config
from moonpool_proto.v1.common_pb2 import Grammar
from tools.fuzz import mutation
from tools.fuzz.target import ROOT, FuzzTarget, Misjudged, text_of
from worker.errors import GrammarBusy, GrammarError, GrammarLost, GrammarTooCostly, RequestFailed, RequestRefused
from worker.grammar import to_llguidance
from worker.grammar_matching import GrammarCompiler
from worker.grammar_processes import FRONTEND_LIMITS, GrammarProcesses, GrammarSource

_PATTERNS = ("(a|b)*c", "[^\\d]{2,5}", "\\p{L}+", "a{1,500}", "(?i)x", "^$", "(((a)))", "[", "\\", "(?=a)", ".*a.{12}")
_SURROGATE = b"\xed\xa0\x80"
_BUNDLED = ROOT / "moonpool" / "data" / "model"
_NUM_TOKENS = 4
_FOLLOWED_ONE_IN = 4  # a case depends on nothing but itself
_BLAMED_ON_COMPILER = "makes its compiler fail"


class GrammarTarget(FuzzTarget):
    """Base of the targets: a frontend's and a worker's processes for grammars."""

    covers: tuple[str, ...] = ("worker/grammar.py", "worker/grammar_frames.py")
    allowed: tuple[type[BaseException], ...] = (GrammarError, GrammarBusy, RequestRefused, RequestFailed)
    deadline_s = 60.0
    kind: Grammar.Kind.ValueType

    def open(self) -> None:
        """Start the templates of both."""
        config = read_config(_BUNDLED)
        self._loop = asyncio.new_event_loop()
        self._checks = GrammarProcesses(FRONTEND_LIMITS, lambda _: None)
        self._compiler = GrammarCompiler(_BUNDLED, config.vocab_size, config.eos_token_ids)
        self._checks.warm_up().future.result()
        self._compiler.warm_up()

    def run(self, case: bytes) -> None:
        """Check the grammar; if it is valid, generate a few tokens under it."""
        source = text_of(case)
        refusal: GrammarError | None = None
        try:
            to_llguidance(self.kind, source)
        except GrammarError as error:
            refusal = error
        try:
            self._checks.check("tenant", GrammarSource(self.kind, source)).future.result()
        except GrammarTooCostly as error:
            raise _judged(error) from error
        if refusal is not None:
            raise Misjudged(f"a grammar was accepted that the rules refuse: {refusal}")
        if zlib.crc32(case) % _FOLLOWED_ONE_IN == 0:
            self._loop.run_until_complete(self._follow(Grammar(kind=self.kind, source=source)))

    async def _follow(self, grammar: Grammar) -> None:
        """Take allowed tokens. After them, another sequence that continues with them must have the same mask."""
        rng, taken = random.Random(grammar.source), list[int]()
        try:
            matcher = await self._compiler.matcher(grammar, np.zeros(0, np.int32), "tenant")
            assert matcher is not None
            while len(taken) < _NUM_TOKENS:
                token = int(rng.choice(np.flatnonzero(matcher.allowed())))
                matcher.take(token)
                if matcher.finish:
                    return
                taken.append(token)
            mask = matcher.allowed()
            continued = await self._compiler.matcher(grammar, np.array(taken, np.int32), "tenant")
            assert continued is not None
        except GrammarLost as lost:
            raise _judged(lost.judge()) from lost
        except RequestRefused as error:
            raise _judged(error) from error
        if not np.array_equal(mask, continued.allowed()):
            raise Misjudged("the mask differs after the same tokens")

    def close(self) -> None:
        """End the processes."""
        self._compiler.close()
        self._checks.close()
        self._loop.close()


def _judged(error: Exception) -> Exception:
    """Return the error; Misjudged if the process ended by a fault that no limit explains."""
    return Misjudged(str(error)) if _BLAMED_ON_COMPILER in str(error) else error


class JsonSchema(GrammarTarget):
    """JSON schemas."""

    name = "json-schema"
    kind = Grammar.KIND_JSON_SCHEMA
    _words = (
        "type", "object", "array", "string", "number", "integer", "properties", "required", "items", "prefixItems",
        "minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "date-time", "uuid", "enum", "const",
        "anyOf", "oneOf", "allOf", "not", "$ref", "#/$defs/a", "#", "$defs", "minimum", "exclusiveMaximum",
        "multipleOf", "additionalProperties", "patternProperties", "unevaluatedProperties", "x-guidance",
        "if", "then", *_PATTERNS,
    )  # fmt: skip

    def seeds(self) -> Sequence[bytes]:
        a: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}}
        found: list[dict[str, Any]] = [
            a,
            {"type": "array", "items": {"type": "string", "pattern": "(a|b)*c", "maxLength": 4}, "minItems": 1},
            {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}},
            {"allOf": [{"type": "string", "pattern": "a*"}, {"type": "string", "minLength": 2}]},
            {"type": "object", "properties": {"a": {"enum": [1, "x", None]}, "b": a}, "required": ["a"],
             "additionalProperties": False},
            {"type": "number", "multipleOf": 0.5, "exclusiveMaximum": 100},
        ]  # fmt: skip
        return [json.dumps(each).encode() for each in found]

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate the schema's structure."""
        return mutation.mutate_json(rng, case, other, (), self._words)


class Regex(GrammarTarget):
    """Regular expressions."""

    name = "regex"
    kind = Grammar.KIND_REGEX
    tokens: tuple[bytes, ...] = (
        b"(",
        b")",
        b"[",
        b"]",
        b"{1,100}",
        b"*",
        b"+",
        b"?",
        b"|",
        b"\\d",
        b"\\p{L}",
        b"(?i)",
        b"[^",
        b"&",
        b"~",
        b".",
        _SURROGATE,
    )

    def seeds(self) -> Sequence[bytes]:
        return [pattern.encode() for pattern in ("(a|b)*c", "[^\\d]{2,5}x?", "\\p{L}+", "a{1,500}", "(?i)x")]


class Lark(GrammarTarget):
    """Lark grammars."""

    name = "lark"
    kind = Grammar.KIND_LARK
    tokens: tuple[bytes, ...] = (
        b"start: ", b"\n", b"T: ", b"/a+/", b'"x"', b" | ", b"~3", b"{2,4}", b"%json {}", b"%import common.INT", b"(",
        b")", b"*", b"+", b"?", b"%ignore / /", b"[lazy]", b"[max_tokens=3]", b" & ", b"~", b"%regex {", b'"a".."z"',
        b"%llguidance {}", b"<[1]>", b"@x", b'{"type":"integer"}', _SURROGATE,
    )  # fmt: skip

    def seeds(self) -> Sequence[bytes]:
        return (
            b'start: "a" | T\nT: /b+/\n',
            b'start: item ("," item)*\nitem: N | S\nN: /-?[0-9]+/\nS: /"[a-z]{0,9}"/\n%ignore / +/\n',
            b'start: x ~ 3\nx: %json {"type": "integer"}\n',
            b"start[max_tokens=5]: T\nT: /a.*/ & /.*b/\n",
        )
