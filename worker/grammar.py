"""Grammars as they come with requests: what is accepted, checked without a tokenizer. Imports no torch.

`check_grammar` is for the front door, `to_llguidance` and `LIMITS` for the workers, who compile by the same rules.
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
# The library negates the bounds of integers as 64-bit ones: with the least of all it would recurse without end.
_LEAST_NUMBER = -9.2e18
_NEGATIVE_NUMBER = re.compile(r"-\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_REPEATS = re.compile(r"(?:\{\s*|~\s*)(\d*)(?:\s*(?:,|\.\.)\s*(\d+))?")
# Rules and definitions that refer to one another nest the compiler's calls: 128 KiB of source nest no deeper than this.
_STACK_NBYTES = 256 << 20
_starting = threading.Lock()


def check_grammar(kind: Grammar.Kind.ValueType, source: str) -> None:
    """Raises GrammarError saying what is wrong with the grammar. Blocks for as long as a compile takes (to 1 s)."""
    grammar = to_llguidance(kind, source)
    problem = on_deep_stack(lambda: LLMatcher.validate_grammar(grammar, limits=LIMITS))
    if problem:
        raise GrammarError(told(problem))


def to_llguidance(kind: Grammar.Kind.ValueType, source: str) -> str:
    """The source in the library's own form, not compiled. Raises GrammarError."""
    try:
        nbytes = len(source.encode())
    except UnicodeEncodeError as error:
        raise GrammarError(f"the grammar is not valid Unicode: {error.reason}") from error
    if nbytes > MAX_SOURCE_NBYTES:
        raise GrammarError(f"the grammar has {nbytes} bytes; at most {MAX_SOURCE_NBYTES} are accepted")
    if kind == Grammar.KIND_JSON_SCHEMA:
        # Without white space between tokens, or a model could pad for ever.
        try:
            form = LLMatcher.grammar_from_json_schema(
                source, overrides={"whitespace_flexible": False, "whitespace_pattern": None}
            )
        except ValueError as error:
            raise GrammarError(told(f"the schema is not a JSON object: {error}")) from error
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
    raise GrammarError(f"grammar kind {kind} is not known: expected a JSON schema, a Lark grammar or a regex")


def _check_number(text: str) -> None:
    if float(text) < _LEAST_NUMBER:
        raise GrammarError(f"the grammar holds the number {told(text)}: none below {_LEAST_NUMBER:g} is accepted")


def _check_repeats(count: str) -> None:
    if len(count) > 9 or int(count or 0) > MAX_LARK_REPEATS:
        raise GrammarError(
            f"the grammar repeats something {told(count)} times; at most {MAX_LARK_REPEATS} are accepted"
        )


def told(problem: str) -> str:
    """The library's message, cut to what a client can use."""
    short = problem.strip()
    return short if len(short) <= _SHOWN_ERROR_CHARS else short[:_SHOWN_ERROR_CHARS] + " ..."


def on_deep_stack(work: Callable[[], T]) -> T:
    """Run `work` on a thread whose stack holds any nesting that MAX_SOURCE_NBYTES can spell; waits for it.

    Raises what `work` raises; what is no Exception, as the library's panics, as a GrammarError.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        except BaseException as panic:
            done.set_exception(GrammarError(told(f"the grammar cannot be compiled: {panic}")))

    thread = threading.Thread(target=run, name="grammar")
    with _starting:
        before = threading.stack_size(_STACK_NBYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return done.result()
