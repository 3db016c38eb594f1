"""Grammars at the door: what is accepted, what is refused, and that no source can end the process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from moonpool_proto.v1.common_pb2 import Grammar
from worker.errors import GrammarError
from worker.grammar import JSON_SCHEMA, check_grammar, on_deep_stack
from worker.grammar import LARK as LARK_KIND
from worker.grammar import REGEX as REGEX_KIND
from worker.grammar_frames import MAX_SOURCE_NBYTES

JSON, LARK, REGEX = Grammar.KIND_JSON_SCHEMA, Grammar.KIND_LARK, Grammar.KIND_REGEX


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (JSON, "{}"),
        (JSON, '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}'),
        (LARK, 'start: "yes" | "no"'),
        (LARK, 'start: %json {"type":"integer"}'),
        (LARK, "start: T~2..500\nT: /b{500}/"),
        (LARK, "start: T\nT: " + " & ".join(f"/.*{c}.*/" for c in "abcdefghijklmnopq")),
        (LARK, 'start: "' + "&" * 50 + '" // ' + "&" * 50),
        (
            JSON,
            json.dumps(
                {
                    "type": "object",
                    "properties": {f"p{i}": {"type": "string", "pattern": f"^[a-f]{{{i}}}$"} for i in range(1, 101)},
                }
            ),
        ),
        (JSON, json.dumps({"type": "string", "allOf": [{"pattern": "^[a-z]*$"}, {"pattern": "^.{2,9}$"}]})),
        (REGEX, r"\d{3}-\d{4}"),
    ],
)
def test_a_sound_grammar_passes(kind: Grammar.Kind.ValueType, source: str) -> None:
    check_grammar(kind, source)


@pytest.mark.parametrize(
    ("kind", "source", "told"),
    [
        (JSON, '{"type":"obj"}', "Invalid type: obj"),
        (JSON, "[1]", "not a JSON object"),
        (JSON, '{"a":', "not a JSON object"),
        (JSON, '{"items":' * 5000 + "{}" + "}" * 5000, "recursion limit"),
        (JSON, '{"$ref":"#/nope"}', "/nope"),
        (JSON, '{"not":{"type":"string"}}', "not"),
        (JSON, '{"type":"string","pattern":"((("}', "unclosed group"),
        (LARK, "", "Empty grammar"),
        (LARK, "start: nope", "nope"),
        (LARK, "start: " + "(" * 50_000 + '"a"' + ")" * 50_000, "too deeply nested"),
        (LARK, "start: a\n" + "\n" * 300, "at most 256"),
        (LARK, 'start: "\ud800"', "Unicode"),
        (LARK, "start: r r\nr: T~70000\nT: /b/", "at most 500, got 70000"),
        (LARK, "start: r~1..9999999999\nr: /b/", "got 9999999999"),
        (LARK, "start: T\nT: /b{2,1000}/", "got 1000"),
        (
            LARK,
            'start: T\nT: /a&b/ & "&" & ' + " & ".join("/x/" for _ in range(16)),
            "at most 16 conjunctions .*got 17",
        ),
        (JSON, json.dumps({"allOf": [{"pattern": "a"}] * 9}), "at most 8 patterns, got 9"),
        (JSON, json.dumps({"items": {"pattern": "b", "allOf": [{"allOf": [{"pattern": "a"}] * 8}]}}), "got 9"),
        (JSON, json.dumps({"patternProperties": {f"a{i}": {} for i in range(17)}}), "at most 16 patterns, got 17"),
        (JSON, json.dumps({"properties": {f"a{i}": {"pattern": "a"} for i in range(513)}}), "at most 512 patterns"),
        (REGEX, "(((", "unclosed group"),
        (REGEX, "(?=a)b", "look-around"),
        (REGEX, "a" * (MAX_SOURCE_NBYTES + 1), f"at most {MAX_SOURCE_NBYTES}"),
        (Grammar.KIND_UNSPECIFIED, "a", "kind 0"),
    ],
)
def test_an_unsound_grammar_is_refused_by_what_is_wrong(kind: Grammar.Kind.ValueType, source: str, told: str) -> None:
    with pytest.raises(GrammarError, match=told) as caught:
        check_grammar(kind, source)
    assert len(str(caught.value)) < 600


def test_the_deepest_nesting_that_fits_does_not_overflow_the_stack() -> None:
    """In a process of its own, which an overflow would end."""
    levels = 2200
    chain = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(levels)}
    source = json.dumps({"$ref": "#/$defs/a0", "$defs": {**chain, f"a{levels}": {}}}, separators=(",", ":"))
    assert 0.7 * MAX_SOURCE_NBYTES < len(source) <= MAX_SOURCE_NBYTES
    script = "import sys; from worker.grammar import check_grammar; check_grammar(1, sys.stdin.read())"
    done = subprocess.run([sys.executable, "-c", script], input=source, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (JSON, '{"enum":["a",-9223372036854775808]}'),
        (JSON, '{"type":"integer","minimum":-1e19,"maximum":-9.3E+18}'),
        (JSON, '{"const":{"a":[-9223372036854775807]}}'),
        (LARK, 'start: %json {"const": -9223372036854775808}'),
    ],
)
def test_a_number_whose_negation_overflows_is_refused_before_it_is_compiled(
    kind: Grammar.Kind.ValueType, source: str
) -> None:
    """In a process of its own, which the library would end."""
    script = f"import sys; from worker.grammar import check_grammar; check_grammar({kind}, sys.stdin.read())"
    done = subprocess.run([sys.executable, "-c", script], input=source, text=True, capture_output=True, check=False)
    assert (done.returncode, "GrammarError" in done.stderr, "at least -9.2e+18" in done.stderr) == (1, True, True)


@pytest.mark.parametrize(
    "source",
    ['{"const":-9000000000000000000}', '{"enum":["-9223372036854775808",9223372036854775808]}', '{"const":1e300}'],
)
def test_other_large_numbers_are_fine(source: str) -> None:
    check_grammar(JSON, source)


def test_kinds_are_those_of_the_protocol() -> None:
    assert (JSON_SCHEMA, LARK_KIND, REGEX_KIND) == (JSON, LARK, REGEX)


def test_checking_needs_neither_torch_nor_protobuf() -> None:
    script = "import sys, worker.grammar_child; sys.exit('torch' in sys.modules or 'google.protobuf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_panic_of_the_library_is_the_grammars_fault() -> None:
    """Its class is no Exception: whoever waits for the request would not hear of it."""

    class PanicException(BaseException):
        pass

    def panic() -> None:
        raise PanicException("index out of bounds")

    with pytest.raises(GrammarError, match="index out of bounds"):
        on_deep_stack(panic)
