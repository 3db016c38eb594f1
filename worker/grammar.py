"""Validation of the grammars that requests carry. Needs no tokenizer and imports no torch.

The frontend calls `check_grammar`; workers use `to_llguidance` and `LIMITS` and so compile by the same rules.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits

from moonpool_proto.v1.common_pb2 import Grammar
from worker.errors import GrammarError

T = TypeVar("T")

MAX_SOURCE_NBYTES = 128 * 1024
MAX_LARK_LINES = 256  # the library's time to report an error grows with the cube of the rules' nesting
MAX_LARK_REPEATS = 500  # nested repetitions multiply in the library's chart: two of these still take half a second
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
_SHOWN_ERROR_CHARS = 500
# The library negates integer bounds as 64-bit values: the smallest one would make it recurse without end.
_LEAST_NUMBER = -9.2e18
_NEGATIVE_NUMBER = re.compile(r"-\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_REPEATS = re.compile(r"(?:\{\s*|~\s*)(\d*)(?:\s*(?:,|\.\.)\s*(\d+))?")
# Rules and definitions that refer to one another nest the compiler's calls: 128 KiB of source nest no deeper than this.
_STACK_NBYTES = 256 << 20
_starting = threading.Lock()


def check_grammar(kind: Grammar.Kind.ValueType, source: str) -> None:
    """Raise GrammarError if the grammar is invalid. Blocks while it compiles (up to 1 s)."""
    grammar = to_llguidance(kind, source)
    problem = on_deep_stack(lambda: LLMatcher.validate_grammar(grammar, limits=LIMITS))
    if problem:
        raise GrammarError(shortened(problem))


def to_llguidance(kind: Grammar.Kind.ValueType, source: str) -> str:
    """Return the source in llguidance's own form, not compiled. Raises GrammarError."""
    try:
        nbytes = len(source.encode())
    except UnicodeEncodeError as error:
        raise GrammarError(f"the grammar is not valid Unicode: {error.reason}") from error
    if nbytes > MAX_SOURCE_NBYTES:
        raise GrammarError(f"the grammar has {nbytes} bytes; at most {MAX_SOURCE_NBYTES} are accepted")
    if kind == Grammar.KIND_JSON_SCHEMA:
        # Without white space between tokens: a model could emit padding without end.
        try:
            form = LLMatcher.grammar_from_json_schema(
                source, overrides={"whitespace_flexible": False, "whitespace_pattern": None}
            )
        except ValueError as error:
            raise GrammarError(shortened(f"the schema is not a JSON object: {error}")) from error
        json.loads(source, parse_int=_check_number, parse_float=_check_number)
        return form
    if kind == Grammar.KIND_LARK:
        if (lines := source.count("\n") + 1) > MAX_LARK_LINES:
            raise GrammarError(f"the grammar has {lines} lines; at most {MAX_LARK_LINES} are accepted")
        for number in _NEGATIVE_NUMBER.findall(source):  # in schemas within it
            _check_number(number)
        for least, most in _REPEATS.findall(source):
            _check_repeats(most or least)
        return LLMatcher.grammar_from_lark(source)
    if kind == Grammar.KIND_REGEX:
        return LLMatcher.grammar_from_regex(source)
    raise GrammarError(f"unknown grammar kind {kind}: expected a JSON schema, a Lark grammar or a regex")


def _check_number(text: str) -> None:
    if float(text) < _LEAST_NUMBER:
        raise GrammarError(f"the grammar holds the number {shortened(text)}: none below {_LEAST_NUMBER:g} is accepted")


def _check_repeats(count: str) -> None:
    if len(count) > 9 or int(count or 0) > MAX_LARK_REPEATS:
        raise GrammarError(
            f"the grammar repeats something {shortened(count)} times; at most {MAX_LARK_REPEATS} are accepted"
        )


def shortened(problem: str) -> str:
    """Shorten a message of the library to what a client can use."""
    short = problem.strip()
    return short if len(short) <= _SHOWN_ERROR_CHARS else short[:_SHOWN_ERROR_CHARS] + " ..."


def on_deep_stack(work: Callable[[], T]) -> T:
    """Run `work` on a thread whose stack holds any nesting that MAX_SOURCE_NBYTES can express, and wait for it.

    Raises what `work` raises; exceptions not derived from Exception, such as panics of the library, become
    GrammarErrors.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        except BaseException as panic:
            done.set_exception(GrammarError(shortened(f"the grammar cannot be compiled: {panic}")))

    thread = threading.Thread(target=run, name="grammar")
    with _starting:
        before = threading.stack_size(_STACK_NBYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return done.result()
