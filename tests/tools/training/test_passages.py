"""Generated passages, questions and small knowledge."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tools.training import knowledge, passages, vocabulary
from tools.training import tokenizer as bpe
from tools.training.corpus import Corpus
from tools.training.passages import Statement
from tools.training.reading import reading_window
from tools.training.relations import RELATIONS, SUBJECT_WEIGHTS, UNKNOWN
from tools.training.transcript import ANSWER_WEIGHT

BY_NAME = {relation.name: relation for relation in RELATIONS}


def test_passages_are_about_subjects_of_every_kind() -> None:
    assert set(SUBJECT_WEIGHTS) == {relation.subject for relation in RELATIONS} <= set(vocabulary.KINDS)


def drawn(seed: int, held_out: bool) -> list[list[Statement]]:
    return passages.draw_passage(np.random.default_rng(seed), 8, held_out=held_out)


@pytest.mark.parametrize("held_out", [False, True])
def test_training_and_evaluation_share_no_statement(held_out: bool) -> None:
    stated = [statement for seed in range(40) for group in drawn(seed, held_out) for statement in group]
    assert len(stated) > 200
    assert {statement.held_out for statement in stated} == {held_out}


def test_a_passage_says_one_thing_about_each_subject_in_each_relation() -> None:
    for seed in range(40):
        keys = [(each.relation.name, each.subject) for group in drawn(seed, False) for each in group]
        assert len(keys) == len(set(keys))


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda relation: relation.name)
def test_every_form_of_a_relation_is_a_sentence_with_its_value(relation: passages.Relation) -> None:
    rng = np.random.default_rng(3)
    subject, value = vocabulary.draw(rng, relation.subject), vocabulary.draw(rng, relation.value)
    statement = Statement(relation, subject, value)
    for _ in range(20):
        for text in (statement.sentence(rng), statement.sentence(rng, "she")):
            assert value.casefold() in text.casefold()
            assert text[0].isupper() or text[0].isdigit()
            assert "{" not in text
        question = passages.ask_about(rng, statement, [statement])
        assert "{" not in question.text + question.answer
        assert value.casefold() in question.answer.casefold()
        assert question.text.endswith("?")


def test_pronouns_stand_for_the_subject_only() -> None:
    rng = np.random.default_rng(0)
    sentences = {Statement(BY_NAME["home"], "Mira", "Oslo").sentence(rng, "she") for _ in range(50)}
    assert "She lives in Oslo." in sentences
    assert "Her house is in Oslo." in sentences
    assert vocabulary.pronoun("Mira") == "she"
    assert vocabulary.pronoun("the key") == "it"
    assert vocabulary.pronoun("Zubrano") is None


def test_a_question_for_the_subject_is_asked_only_where_one_subject_has_the_value() -> None:
    first, second = (Statement(BY_NAME["home"], name, "Oslo") for name in ("Mira", "Tom"))
    rng = np.random.default_rng(0)
    alone = {passages.ask_about(rng, first, [first]).text for _ in range(60)}
    shared = {passages.ask_about(rng, first, [first, second]).text for _ in range(60)}
    assert "Who lives in Oslo?" in alone
    assert "Who lives in Oslo?" not in shared


def test_what_is_not_stated_is_not_known() -> None:
    stated = [Statement(BY_NAME["home"], "Mira", "Oslo")]
    found = [passages.ask_unanswered(np.random.default_rng(seed), stated) for seed in range(80)]
    asked = [question for question in found if question is not None]
    assert len(asked) > 40
    assert {question.answer for question in asked} == {UNKNOWN}
    assert all("Mira" not in question.text or "live" not in question.text for question in asked)


def test_sums_and_days_are_right() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        question = knowledge.ask(rng, ())
        words = question.answer.rstrip(".").split()
        if "plus" in words or "minus" in words:
            first, sign, second, _, result = words
            assert int(result) == int(first) + (int(second) if sign == "plus" else -int(second))
    assert knowledge.definition("owl", "a bird").answer == "An owl is a bird."


def test_a_reading_window_answers_with_weight_what_its_text_states(cache: Path, tokenizer: Tokenizer) -> None:
    corpus = Corpus.load(cache / "data", "train")
    for seed in range(6):
        ids, weights = reading_window(np.random.default_rng(seed), corpus, tokenizer, 500)
        assert len(ids) == len(weights) == 500
        assert ids[0] == bpe.BOS_ID
        heavy = [token for token, weight in zip(ids, weights, strict=True) if weight == ANSWER_WEIGHT]
        assert 20 < len(heavy) < 300
