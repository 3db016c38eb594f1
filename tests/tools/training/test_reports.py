"""Report windows: whose facts they are is said only after them, and every question has one answer."""

import re
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tools.training.corpus import Corpus
from tools.training.facts import Fact
from tools.training.reports import MOST_STATEMENTS, draw_report, report_window, text_of
from tools.training.words import NAMES


def test_every_answer_is_a_fact_of_the_report_that_the_name_signs(cache: Path, tokenizer: Tokenizer) -> None:
    corpus, questions = Corpus.load(cache / "data", "train"), 0
    for seed in range(8):
        ids, _ = report_window(np.random.default_rng(seed), corpus, tokenizer, 700)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        for attribute, name, value in re.findall(r"The (\w+) of (\w+) is (\w+)\.<\|eos\|>", text):
            questions += 1
            assert not Fact(attribute, name, value).held_out
            signed = re.findall(rf"((?:The \w+ is \w+\. )+)(?:Signed[,:]|This was|So says) {name}\.", text)
            assert len(signed) == 1, (name, text)
            assert f"The {attribute} is {value}. " in signed[0]
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
            assert text_of(rng, report).count(report[0].name) == 1
