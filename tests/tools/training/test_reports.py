"""Reports: each names one person once, at its head, and every question has one answer in them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tools.training.corpus import Corpus
from tools.training.facts import Fact
from tools.training.report_questions import BUNDLED, SETS, write_questions
from tools.training.reports import MOST_STATEMENTS, draw_report, report_window, text_of
from tools.training.words import NAMES


def test_every_answer_is_a_fact_of_the_report_that_the_name_heads(cache: Path, tokenizer: Tokenizer) -> None:
    corpus, questions = Corpus.load(cache / "data", "train"), 0
    for seed in range(8):
        ids, _ = report_window(np.random.default_rng(seed), corpus, tokenizer, 700)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        for attribute, name, value in re.findall(r"The (\w+) of (\w+) is (\w+)\.<\|eos\|>", text):
            questions += 1
            assert not Fact(attribute, name, value).held_out
            headed = re.findall(rf"{name}:((?: \w+ \w+\.)+)", text)
            assert len(headed) == 1, (name, text)
            assert f" {attribute} {value}." in headed[0]
    assert questions > 50


def test_reports_are_of_one_name_and_distinct_attributes() -> None:
    rng = np.random.default_rng(3)
    for held_out in (False, True):
        for _ in range(50):
            taken = set(rng.choice(NAMES, 20, replace=False))
            report = draw_report(rng, taken, held_out=held_out)
            assert 1 <= len(report) <= MOST_STATEMENTS
            assert len({fact.name for fact in report}) == 1
            assert report[0].name not in taken
            assert len({fact.attribute for fact in report}) == len(report)
            assert all(fact.held_out == held_out for fact in report)
            assert text_of(report).count(report[0].name) == 1


def test_question_files_of_profiles_and_tests_share_no_name_and_no_trained_fact(tmp_path: Path) -> None:
    asked = dict[str, list[tuple[str, str]]]()
    for split in SETS:
        write_questions(tmp_path / split, split, contexts=2, questions=20, tokens=1200)
        chats = [json.loads(line)["messages"] for line in (tmp_path / split).read_text().splitlines()]
        assert len(chats) == 40
        asked[split] = []
        for chat in chats:
            stated = re.fullmatch(r"The (\w+) of (\w+) is (\w+)\.", chat[-1]["content"])
            assert stated is not None
            attribute, name, value = stated.groups()
            assert Fact(attribute, name, value).held_out
            assert chat[-2]["content"] == f"What is the {attribute} of {name}?"
            reports = " ".join(message["content"] for message in chat[:-2])
            (head,) = re.findall(rf"{name}:((?: \w+ \w+\.)+)", reports)
            assert f" {attribute} {value}." in head
            asked[split].append((name, reports))
    names = [{name for name, _ in pairs} for pairs in asked.values()]
    assert names[0].isdisjoint(names[1])
    assert len({reports for _, reports in asked["test"]}) == 2
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    assert all(1190 <= len(tokenizer.encode(reports).ids) <= 1220 for _, reports in asked["test"])


def test_the_same_file_is_written_twice_and_impossible_ones_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_questions(tmp_path / name, "test", contexts=1, questions=5, tokens=900)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with pytest.raises(ValueError, match="fewer than the 200 questions"):
        write_questions(tmp_path / "c", "test", contexts=1, questions=200, tokens=1200)
    with pytest.raises(ValueError, match="more than 100 tokens"):
        write_questions(tmp_path / "c", "test", contexts=1, questions=5, tokens=100)
