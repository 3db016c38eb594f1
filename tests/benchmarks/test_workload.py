"""The inputs that the field's tools get: the scaled trace, the tokenizer's cache layout, the questions."""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.clients.environments import REQUIREMENTS, Environment, offline
from benchmarks.clients.fact_questions import draw_question, write_questions
from benchmarks.clients.hub import store_tokenizer
from benchmarks.clients.workload import TOKENS_PER_BLOCK, write_workload
from traces import read_trace

MODEL = Path(__file__).parents[2] / "moonpool" / "data" / "model"


def test_both_traces_ask_for_the_same_work_at_the_same_times(tmp_path: Path) -> None:
    scaled, ours = write_workload(tmp_path, requests=50, speed=10.0, max_prompt_tokens=800)
    small = read_trace(scaled, block_tokens=TOKENS_PER_BLOCK)
    large = read_trace(ours)
    assert len(small) == len(large) == 50
    assert small.rows[0].timestamp_ms == 0
    for a, b in zip(small, large, strict=True):
        assert (a.timestamp_ms, a.hash_ids) == (b.timestamp_ms, b.hash_ids)
        assert a.input_length == len(a.hash_ids) * TOKENS_PER_BLOCK <= 800
        assert (b.input_length, b.output_length) == (a.input_length * 64, a.output_length * 64)
    assert len({row.hash_ids[1] for row in small}) < 50, "no two requests share a prefix"


def test_the_tokenizer_is_found_offline_by_its_repository_name(tmp_path: Path) -> None:
    name = store_tokenizer(tmp_path, MODEL)
    assert store_tokenizer(tmp_path, MODEL) == name
    repository = tmp_path / "hub" / "models--moonpool--bundled"
    revision = (repository / "refs" / "main").read_text()
    assert [path.name for path in (repository / "snapshots").iterdir()] == [revision]
    found = Tokenizer.from_file(str(repository / "snapshots" / revision / "tokenizer.json"))
    assert found.encode("In the beginning").ids[0] == 0


def test_tools_are_told_to_fetch_nothing(tmp_path: Path) -> None:
    variables = offline(tmp_path)
    assert variables["HF_HOME"] == str(tmp_path)
    assert {variables[name] for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")} == {"1"}


def test_every_tool_is_pinned_with_all_that_it_needs() -> None:
    for path in sorted(REQUIREMENTS.iterdir()):
        assert all("==" in line for line in path.read_text().splitlines())
        assert Environment(path.stem, Path()).version()


def test_questions_are_the_same_every_time_and_their_answer_stands_in_the_notes(tmp_path: Path) -> None:
    questions = write_questions(tmp_path / "facts.jsonl", 20)
    assert questions == write_questions(tmp_path / "again.jsonl", 20)
    rows = [json.loads(line) for line in (tmp_path / "facts.jsonl").read_text().splitlines()]
    for question, row in zip(questions, rows, strict=True):
        *notes, asked, stem = question.context.split("\n")
        assert stem + question.choices[question.answer] in notes
        assert asked.startswith("What is the ")
        assert len(set(question.choices)) == 4
        assert row == {"context": question.context, "choices": list(question.choices), "answer": question.answer}


def test_no_wrong_choice_is_what_the_notes_say_of_the_asked() -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        question = draw_question(rng)
        *notes, _, stem = question.context.split("\n")
        assert sum(stem + choice in notes for choice in question.choices) == 1
