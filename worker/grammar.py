"""Validation of requests' grammars. Needs no tokenizer and imports no torch.

The frontend calls `check_grammar`; workers compile with `to_llguidance` and `LIMITS`, so both apply the same rules.
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
MAX_LARK_LINES = 256  # the library's time to report an error grows with the cube of the rules' nesting depth
MAX_LARK_REPEATS = 500  # nested repetitions multiply in the library's parser: two of these still take half a second
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
_SHOWN_ERROR_CHARS = 500
# The library negates integer bounds as 64-bit values: the smallest value would recurse without end.
_LEAST_NUMBER = -9.2e18
_NEGATIVE_NUMBER = re.compile(r"-\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_REPEATS = re.compile(r"(?:\{\s*|~\s*)(\d*)(?:\s*(?:,|\.\.)\s*(\d+))?")
# References between rules and definitions nest the compiler's calls; 128 KiB of source cannot nest deeper than this.
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
        raise GrammarError(f"the grammar must have at most {MAX_SOURCE_NBYTES} bytes, got {nbytes}")
    if kind == Grammar.KIND_JSON_SCHEMA:
        # No white space is allowed between tokens: a model could emit padding without end.
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
            raise GrammarError(f"the grammar must have at most {MAX_LARK_LINES} lines, got {lines}")
        for number in _NEGATIVE_NUMBER.findall(source):  # in embedded schemas
            _check_number(number)
        for least, most in _REPEATS.findall(source):
            _check_repeats(most or least)
        return LLMatcher.grammar_from_lark(source)
    if kind == Grammar.KIND_REGEX:
        return LLMatcher.grammar_from_regex(source)
    raise GrammarError(f"the grammar must be a JSON schema, a Lark grammar or a regex, got kind {kind}")


def _check_number(text: str) -> None:
    if float(text) < _LEAST_NUMBER:
        raise GrammarError(f"numbers in the grammar must be at least {_LEAST_NUMBER:g}, got {shortened(text)}")


def _check_repeats(count: str) -> None:
    if len(count) > 9 or int(count or 0) > MAX_LARK_REPEATS:
        raise GrammarError(
            f"repetition counts in the grammar must be at most {MAX_LARK_REPEATS}, got {shortened(count)}"
        )


def shortened(problem: str) -> str:
    """Return the beginning of a message of the library, short enough for a client."""
    short = problem.strip()
    return short if len(short) <= _SHOWN_ERROR_CHARS else short[:_SHOWN_ERROR_CHARS] + " ..."


def on_deep_stack(work: Callable[[], T]) -> T:
    """Run `work` on a thread whose stack fits any nesting that MAX_SOURCE_NBYTES can express, and wait for it.

    Raises the exceptions of `work`; those not derived from Exception, such as panics of the library, become
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
