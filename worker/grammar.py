"""Rules for requests' grammars, and their compilation by llguidance.

Both run in processes that may be killed (`worker.grammar_child`): compiling a hostile grammar takes exponential time
and memory. The module imports neither torch nor protobuf, so that such a process starts quickly.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits

from worker.errors import GrammarError
from worker.grammar_frames import MAX_LARK_REPEATS, source_nbytes

T = TypeVar("T")

# Values of moonpool_proto's Grammar.Kind.
JSON_SCHEMA, LARK, REGEX = 1, 2, 3

MAX_LARK_LINES = 256  # the library's time to report an error grows with the cube of the rules' nesting depth
# An automaton of conjoined expressions may need the product of their states.
MAX_LARK_CONJUNCTIONS = 16
MAX_CONJOINED_PATTERNS = 8  # within one allOf
MAX_PATTERN_PROPERTIES = 16  # of one object; the library conjoins each with the others' complements
MAX_PATTERNS = 512  # of a whole schema
# A step's items and a row's items bound the work of a step, if not tightly: an ambiguous grammar looks at each item of
# a row for each new item. The process's time limit per token bounds the rest.
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
_SHOWN_ERROR_CHARS = 500
# The library negates integer bounds as 64-bit values: the smallest value would recurse without end.
_LEAST_NUMBER = -9.2e18
_NEGATIVE_NUMBER = re.compile(r"-\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_REPEATS = re.compile(r"(?:\{\s*|~\s*)(\d*)(?:\s*(?:,|\.\.)\s*(\d+))?")
# Comments, string literals and regular expressions, in which `&` is no operator; or the operator.
_LARK_TOKEN = re.compile(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|(&)')
# References between rules and definitions nest the compiler's calls; 128 KiB of source cannot nest deeper than this.
STACK_NBYTES = 256 << 20
_DEEP_THREAD = "grammar"
_starting = threading.Lock()


def check_grammar(kind: int, source: str) -> None:
    """Raise GrammarError if the grammar is invalid. A hostile grammar takes minutes and gigabytes."""
    grammar = to_llguidance(kind, source)
    problem = on_deep_stack(lambda: LLMatcher.validate_grammar(grammar, limits=LIMITS))
    if problem:
        raise GrammarError(shortened(problem))


def to_llguidance(kind: int, source: str) -> str:
    """Return the source in llguidance's own form, not compiled. Raises GrammarError."""
    source_nbytes(source)
    if kind == JSON_SCHEMA:
        # No white space is allowed between tokens: a model could emit padding without end.
        try:
            form: str = LLMatcher.grammar_from_json_schema(
                source, overrides={"whitespace_flexible": False, "whitespace_pattern": None}
            )
        except ValueError as error:
            raise GrammarError(shortened(f"the schema is not a JSON object: {error}")) from error
        _check_patterns(json.loads(source, parse_int=_check_number, parse_float=_check_number))
        return form
    if kind == LARK:
        _check_lark(source)
        lark: str = LLMatcher.grammar_from_lark(source)
        return lark
    if kind == REGEX:
        regex: str = LLMatcher.grammar_from_regex(source)
        return regex
    raise GrammarError(f"the grammar must be a JSON schema, a Lark grammar or a regex, got kind {kind}")


def _check_lark(source: str) -> None:
    if (lines := source.count("\n") + 1) > MAX_LARK_LINES:
        raise GrammarError(f"the grammar must have at most {MAX_LARK_LINES} lines, got {lines}")
    for number in _NEGATIVE_NUMBER.findall(source):  # in embedded schemas
        _check_number(number)
    for least, most in _REPEATS.findall(source):
        _check_repeats(most or least)
    if (conjunctions := sum(map(bool, _LARK_TOKEN.findall(source)))) > MAX_LARK_CONJUNCTIONS:
        raise GrammarError(
            f"the grammar must have at most {MAX_LARK_CONJUNCTIONS} conjunctions (&), got {conjunctions}"
        )


def _check_patterns(schema: Any) -> None:
    """Raise GrammarError for more patterns than the limits."""
    num_patterns, values = 0, [schema]
    while values:
        value = values.pop()
        if isinstance(value, list):
            values += value
        elif isinstance(value, dict):
            values += value.values()
            named = value.get("patternProperties")
            num_named = len(named) if isinstance(named, dict) else 0
            num_patterns += num_named + isinstance(value.get("pattern"), str)
            if num_named > MAX_PATTERN_PROPERTIES:
                raise GrammarError(
                    f"patternProperties must have at most {MAX_PATTERN_PROPERTIES} patterns, got {num_named}"
                )
            if "allOf" in value and (conjoined := _conjoined_patterns(value)) > MAX_CONJOINED_PATTERNS:
                raise GrammarError(f"allOf must conjoin at most {MAX_CONJOINED_PATTERNS} patterns, got {conjoined}")
    if num_patterns > MAX_PATTERNS:
        raise GrammarError(f"the schema must have at most {MAX_PATTERNS} patterns, got {num_patterns}")


def _conjoined_patterns(schema: dict[str, Any]) -> int:
    """Return the number of patterns that the same string must match; references are not followed."""
    num, parts = 0, [schema]
    while parts:
        part = parts.pop()
        num += isinstance(part.get("pattern"), str)
        inner = part.get("allOf")
        parts += [each for each in inner if isinstance(each, dict)] if isinstance(inner, list) else []
    return num


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
    GrammarErrors. Within `work` further calls use the same thread.
    """
    if threading.current_thread().name == _DEEP_THREAD:
        return _without_panics(work)
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(_without_panics(work))
        except Exception as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name=_DEEP_THREAD)
    with _starting:
        before = threading.stack_size(STACK_NBYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return done.result()


def _without_panics(work: Callable[[], T]) -> T:
    try:
        return work()
    except Exception:
        raise
    except BaseException as panic:
        raise GrammarError(shortened(f"the grammar cannot be compiled: {panic}")) from None
