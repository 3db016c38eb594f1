"""Generated passages and questions about them. Pure; the random generator is an argument.

A passage states several things about a few subjects in varied sentences, with pronouns, in any order. A question is
about one statement, in other words than the statement's; some questions have no answer in the passage.
"""

import zlib
from dataclasses import dataclass

import numpy as np

from tools.training import vocabulary
from tools.training.relations import SUBJECT_WEIGHTS, UNKNOWN, Relation, relations_of

HELD_OUT_ONE_IN = 8
REVERSED_SHARE = 0.2
TRAINED_REVERSED_SHARE = 0.5
"""More than are evaluated, since questions that name the value and ask for the subject are learned later."""
UNKNOWN_SHARE = 0.12
PRONOUN_SHARE = 0.5
LIST_SHARE = 0.15


@dataclass(frozen=True)
class Statement:
    """Statement that ``subject`` has ``value`` in a relation."""

    relation: Relation
    subject: str
    value: str

    @property
    def held_out(self) -> bool:
        """True for the subjects about which training never says anything in this relation (one in eight, by hash)."""
        return zlib.crc32(f"{self.relation.name}/{self.subject}".encode()) % HELD_OUT_ONE_IN == 0

    def sentence(self, rng: np.random.Generator, pronoun: str | None = None) -> str:
        """Return one of the relation's sentences, about ``pronoun`` in place of the subject if it is given."""
        replaceable = tuple(form for form in self.relation.statements if form.startswith("{s}"))
        if pronoun is None or not replaceable:
            return _filled(vocabulary.pick(rng, self.relation.statements), self.subject, self.value)
        template = vocabulary.pick(rng, replaceable).replace("{s}'s", vocabulary.POSSESSIVES[pronoun])
        return _filled(template, pronoun, self.value)


@dataclass(frozen=True)
class QuestionAnswer:
    """A question and its whole answer."""

    text: str
    answer: str


def draw_passage(rng: np.random.Generator, statements: int, *, held_out: bool) -> list[list[Statement]]:
    """Return about ``statements`` statements, grouped by subject; each (relation, subject) occurs once."""
    groups = dict[str, list[Statement]]()
    kinds = tuple(SUBJECT_WEIGHTS)
    weights = np.array([SUBJECT_WEIGHTS[kind] for kind in kinds])
    chosen = rng.choice(len(kinds), size=int(rng.integers(1, 4)), p=weights / weights.sum())
    for _ in range(8 * statements):
        kind = kinds[chosen[rng.integers(len(chosen))]]
        known = [group[0].subject for group in groups.values() if group[0].relation.subject == kind]
        again = known and rng.random() < 0.5
        subject = known[rng.integers(len(known))] if again else vocabulary.draw(rng, kind)
        choices = relations_of(kind)
        relation = choices[rng.integers(len(choices))]
        statement = Statement(relation, subject, vocabulary.draw(rng, relation.value))
        group = groups.get(subject, [])
        taken = any(other.relation is relation for other in group) or statement.value == subject
        if taken or statement.held_out != held_out:
            continue
        groups.setdefault(subject, []).append(statement)
        if sum(map(len, groups.values())) >= statements:
            break
    return list(groups.values())


def text_of(rng: np.random.Generator, groups: list[list[Statement]]) -> str:
    """Return the passage as prose or, sometimes, as a list with one statement a line."""
    if rng.random() < LIST_SHARE:
        return "\n".join(f"- {statement.sentence(rng)}" for group in groups for statement in group)
    sentences = list[str]()
    for group in groups:
        for index, statement in enumerate(group):
            known = vocabulary.pronoun(statement.subject) if index and rng.random() < PRONOUN_SHARE else None
            sentences.append(statement.sentence(rng, known))
    return " ".join(sentences)


def ask(rng: np.random.Generator, stated: list[Statement]) -> QuestionAnswer:
    """Return a training question about one of the statements, or sometimes one that they do not answer."""
    if rng.random() < UNKNOWN_SHARE:
        unknown = ask_unanswered(rng, stated)
        if unknown is not None:
            return unknown
    return ask_about(rng, stated[int(rng.integers(len(stated)))], stated, TRAINED_REVERSED_SHARE)


def ask_about(
    rng: np.random.Generator, statement: Statement, stated: list[Statement], reversed_share: float = REVERSED_SHARE
) -> QuestionAnswer:
    """Return a question that this statement alone answers."""
    relation = statement.relation
    answer = _filled(relation.answer, statement.subject, statement.value)
    if relation.reverse and rng.random() < reversed_share:
        same = [
            other for other in stated if other.value == statement.value and other.relation.subject == relation.subject
        ]
        if len(same) == 1:
            return QuestionAnswer(_filled(vocabulary.pick(rng, relation.reverse), "", statement.value), answer)
    return QuestionAnswer(_filled(vocabulary.pick(rng, relation.questions), statement.subject, statement.value), answer)


def ask_unanswered(rng: np.random.Generator, stated: list[Statement]) -> QuestionAnswer | None:
    """Return a question that the statements do not answer, about their subjects or relations; None if they do."""
    near = stated[int(rng.integers(len(stated)))]
    if rng.random() < 0.5:
        choices = relations_of(near.relation.subject)
        relation, subject = choices[rng.integers(len(choices))], near.subject
    else:
        relation, subject = near.relation, vocabulary.draw(rng, near.relation.subject)
    if any(other.relation is relation and other.subject == subject for other in stated):
        return None
    return QuestionAnswer(_filled(vocabulary.pick(rng, relation.questions), subject, ""), UNKNOWN)


def _filled(template: str, subject: str, value: str) -> str:
    text = template.replace("{s}", subject).replace("{v}", value)
    return text[0].upper() + text[1:]
