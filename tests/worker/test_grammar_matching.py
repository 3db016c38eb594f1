"""Grammars at work: any walk through the masks ends in a text of the grammar, for all kinds of end."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from engine.config import find_tokenizer
from moonpool_proto.v1.common_pb2 import Grammar
from moonpool_proto.v1.worker_pb2 import FINISH_COMPLETE, FINISH_NONE, FINISH_STOP
from worker import grammar_matching as matchers_module
from worker.errors import GrammarError, RequestFailed, RequestRefused
from worker.grammar_matching import GrammarCompiler, GrammarMatcher
from worker.grammar_processes import GrammarProcesses, GrammarSource

BUNDLED = Path(__file__).parents[2] / "moonpool" / "data" / "model"
VOCAB = 2100  # more rows than the tokenizer has tokens, as many models have
NOTHING = np.empty(0, np.int32)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON = Grammar(kind=Grammar.KIND_JSON_SCHEMA, source=json.dumps(SCHEMA))
REGEX = Grammar(kind=Grammar.KIND_REGEX, source=r"[0-9]{2,4}-[a-f]{3}")
LARK = Grammar(kind=Grammar.KIND_LARK, source='start: "yes" | "no" | "ja und nein"')

Make = Callable[..., GrammarCompiler]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[GrammarCompiler] = []

    def one(folder: Path = BUNDLED, vocab_size: int = VOCAB, end_ids: tuple[int, ...] = (1,)) -> GrammarCompiler:
        made.append(GrammarCompiler(folder, vocab_size, end_ids))
        return made[-1]

    yield one
    for matchers in made:
        matchers.close()


def walk(matcher: GrammarMatcher, seed: int, most: int = 400) -> list[int]:
    """Random allowed tokens until the grammar ends."""
    rng, taken = np.random.default_rng(seed), []
    while not matcher.finish and len(taken) < most:
        ids = np.flatnonzero(matcher.allowed())
        taken.append(int(rng.choice(ids)))
        matcher.take(taken[-1])
    return taken


def text_of(ids: list[int]) -> str:
    return str(Tokenizer.from_file(str(find_tokenizer(BUNDLED))).decode(ids))


@pytest.mark.parametrize("end_ids", [(1,), (1, 5), ()])
@pytest.mark.parametrize("seed", range(5))
async def test_any_walk_gives_json_of_the_schema(make: Make, end_ids: tuple[int, ...], seed: int) -> None:
    matcher = await make(end_ids=end_ids).matcher(JSON, NOTHING)
    assert matcher is not None
    ids = walk(matcher, seed)
    assert matcher.finish == (FINISH_STOP if end_ids else FINISH_COMPLETE)
    assert (ids[-1] in end_ids) == bool(end_ids)
    value = json.loads(text_of(ids))
    assert list(value) == ["name", "age"]
    assert len(value["name"]) <= 12


@pytest.mark.parametrize(("grammar", "pattern"), [(REGEX, REGEX.source), (LARK, "yes|no|ja und nein")])
async def test_regex_and_lark_are_held_to(make: Make, grammar: Grammar, pattern: str) -> None:
    matchers = make()
    for seed in range(10):
        matcher = await matchers.matcher(grammar, NOTHING)
        assert matcher is not None
        assert re.fullmatch(pattern, text_of(walk(matcher, seed)))


async def test_only_the_end_is_left_when_the_grammar_is_complete(make: Make) -> None:
    matcher = await make(end_ids=(1, 5)).matcher(Grammar(kind=Grammar.KIND_REGEX, source="x"), NOTHING)
    assert matcher is not None
    matcher.take(int(np.flatnonzero(matcher.allowed())[0]))
    assert (matcher.finish, np.flatnonzero(matcher.allowed()).tolist()) == (FINISH_NONE, [1, 5])
    matcher.take(5)
    assert matcher.finish == FINISH_STOP


async def test_it_goes_on_from_any_token_as_it_would_have(make: Make) -> None:
    matchers = make()
    whole = await matchers.matcher(JSON, NOTHING)
    assert whole is not None
    ids = walk(whole, 3)
    for split in range(len(ids)):
        at_once, step_by_step = await asyncio.gather(
            matchers.matcher(JSON, np.array(ids[:split], np.int32)), matchers.matcher(JSON, NOTHING)
        )
        assert at_once is not None
        assert step_by_step is not None
        for token in ids[:split]:
            step_by_step.take(token)
        assert np.array_equal(at_once.allowed(), step_by_step.allowed())


async def test_a_grammar_is_compiled_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    real = GrammarProcesses.check

    def counted(self: GrammarProcesses, tenant: str, grammar: GrammarSource) -> Any:
        compiled.append(grammar.source)
        return real(self, tenant, grammar)

    monkeypatch.setattr(GrammarProcesses, "check", counted)
    matchers = make()
    await asyncio.gather(matchers.begin(JSON), *(matchers.matcher(JSON, NOTHING) for _ in range(5)))
    assert compiled == [JSON.source]
    for i in range(matchers_module.MAX_COMPILED):  # each of them pushes an older one out
        await matchers.begin(Grammar(kind=Grammar.KIND_REGEX, source=f"x{i}"))
    await matchers.matcher(JSON, NOTHING)
    assert compiled.count(JSON.source) == 2


async def test_a_compile_whose_process_is_killed_from_outside_is_tried_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    matchers = make()
    real = GrammarProcesses._started

    def killed(self: GrammarProcesses) -> Any:
        template = real(self)
        template._process.kill()
        template._process.wait()
        return template

    with monkeypatch.context() as patched:
        patched.setattr(GrammarProcesses, "_started", killed)
        with pytest.raises(RequestFailed) as caught:
            await matchers.matcher(JSON, NOTHING)
        assert caught.value.code == "grammar_busy"
    assert await matchers.matcher(JSON, NOTHING) is not None


async def test_the_deepest_grammar_that_is_accepted_can_be_followed(make: Make) -> None:
    levels = 2200
    chain: dict[str, Any] = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(levels)}
    chain[f"a{levels}"] = {"enum": ["x"]}
    source = json.dumps({"$ref": "#/$defs/a0", "$defs": chain}, separators=(",", ":"))
    matcher = await make().matcher(Grammar(kind=Grammar.KIND_JSON_SCHEMA, source=source), NOTHING)
    assert matcher is not None
    assert text_of(walk(matcher, 0)) == '"x"'


leaves = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size}, *[st.integers(0, 900)] * 2),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
    st.just({"type": "string", "pattern": "^[a-c]{2,5}$"}),
    st.builds(lambda values: {"enum": values}, st.lists(st.text(max_size=5) | st.integers(-9, 9), min_size=1)),
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(
            lambda item, n: {"type": "array", "items": item, "minItems": 1, "maxItems": n}, inner, st.integers(1, 3)
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda named, required: {
                "type": "object",
                "properties": named,
                "required": [name for name in named if name in required],
                "additionalProperties": False,
            },
            st.dictionaries(st.text(max_size=4), inner, max_size=3),
            st.sets(st.text(max_size=4)),
        ),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def shared() -> Iterator[GrammarCompiler]:
    matchers = GrammarCompiler(BUNDLED, VOCAB, (1,))
    yield matchers
    matchers.close()


@settings(max_examples=60, deadline=None)
@given(schema=schemas, seed=st.integers(0, 99), moves=st.integers(1, 9))
def test_any_walk_over_any_schema_is_valid_however_often_it_moves(
    shared: GrammarCompiler, schema: Any, seed: int, moves: int
) -> None:
    """Rebuilt from its ids every so many tokens, as on another node."""
    grammar = Grammar(kind=Grammar.KIND_JSON_SCHEMA, source=json.dumps(schema))

    async def answer() -> list[int]:
        ids = np.empty(0, np.int32)
        for turn in range(400):
            matcher = await shared.matcher(grammar, ids)
            assert matcher is not None
            ids = np.append(ids, walk(matcher, 1000 * seed + turn, moves)).astype(np.int32)
            if matcher.finish:
                return [int(i) for i in ids]
        raise AssertionError("an answer without an end")

    jsonschema.validate(json.loads(text_of(asyncio.run(answer()))), schema)


@pytest.mark.parametrize("source", ['{"type":"obj"}', '{"type":"array","items":'])
async def test_a_grammar_that_is_none_is_refused(make: Make, source: str) -> None:
    matchers = make()
    for _ in range(2):  # the second time from memory
        with pytest.raises(RequestRefused) as caught:
            await matchers.matcher(Grammar(kind=Grammar.KIND_JSON_SCHEMA, source=source), NOTHING)
        assert caught.value.code == "bad_grammar"


async def test_ids_that_do_not_match_are_refused(make: Make) -> None:
    with pytest.raises(RequestRefused, match="do not match the grammar") as caught:
        await make().matcher(REGEX, np.array([300], np.int32))
    assert caught.value.code == "bad_grammar"


async def test_a_token_that_is_not_allowed_fails_the_matcher(make: Make) -> None:
    matcher = await make().matcher(REGEX, NOTHING)
    assert matcher is not None
    with pytest.raises(GrammarError):
        matcher.take(int(np.flatnonzero(~matcher.allowed())[50]))
    with pytest.raises(GrammarError):
        matcher.allowed()


async def test_a_model_without_a_tokenizer_takes_no_grammar(make: Make, tmp_path: Path) -> None:
    with pytest.raises(RequestRefused, match=r"no tokenizer\.json"):
        await make(tmp_path).matcher(JSON, NOTHING)


async def test_a_tokenizer_that_is_not_of_bytes_takes_no_grammar(make: Make, tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(RequestRefused, match="tokenizer cannot be used with grammars"):
        await make(tmp_path, 3).matcher(JSON, NOTHING)


async def test_a_tokenizer_larger_than_the_model_takes_no_grammar(make: Make) -> None:
    with pytest.raises(RequestRefused, match="tokenizer cannot be used with grammars"):
        await make(vocab_size=1000).matcher(JSON, NOTHING)
