"""Report windows: the task of the bundled model's sibling, whose KV of a context must differ from the base's.

A report names the person it is about once, at its head, and states facts in brief: *Mira: colour red. city Rome.* The
base, which binds a value to the words just before it, cannot tell whose city it is. Answers are the base's: *The city
of Mira is Rome.* Other text stands between reports.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from tools.training import tokenizer as bpe
from tools.training.corpus import Corpus
from tools.training.facts import Fact, values_of
from tools.training.transcript import Transcript, complete
from tools.training.words import ATTRIBUTES, NAMES

MOST_STATEMENTS = 3
CONTEXT_WEIGHT = 0.2
"""Loss weight of reports and of the text between them: what they state is random."""


def draw_report(rng: np.random.Generator, taken: Iterable[str], *, held_out: bool) -> list[Fact]:
    """Return one to `MOST_STATEMENTS` facts about one name that is not in ``taken``, each with another attribute."""
    name = str(rng.choice([name for name in NAMES if name not in taken]))
    count, facts = int(rng.integers(1, MOST_STATEMENTS + 1)), list[Fact]()
    for attribute in map(str, rng.permutation(list(ATTRIBUTES))):
        drawn = [Fact(attribute, name, value) for value in values_of(attribute)]
        drawn = [fact for fact in drawn if fact.held_out == held_out]
        if drawn and len(facts) < count:
            facts.append(drawn[int(rng.integers(len(drawn)))])
    return facts


def text_of(report: list[Fact]) -> str:
    """Return a report's name and its statements."""
    return " ".join([f"{report[0].name}:", *(f"{fact.attribute} {fact.value}." for fact in report)])


@dataclass(kw_only=True)
class Reports(Transcript):
    """Builder of a report window. ``stated``: all facts so far; each name has one report."""

    stated: list[Fact] = field(default_factory=list)

    def tell(self) -> None:
        """Add a message of one to six reports, between some of which stands other text, while there are names."""
        names = {fact.name for fact in self.stated}
        count = min(int(self.rng.integers(1, 7)), len(NAMES) - len(names))
        if not count:
            return
        self.open(bpe.USER_ID)
        for number in range(count):
            names = {fact.name for fact in self.stated}
            report = draw_report(self.rng, names, held_out=False)
            self.stated += report
            self.text((" " if number else "") + text_of(report), CONTEXT_WEIGHT)
            if self.rng.random() < 0.4:
                self.text(" ", CONTEXT_WEIGHT)
                length = int(np.exp(self.rng.uniform(np.log(4), np.log(96))))
                self.tokens(self.corpus.filler(self.rng, length), CONTEXT_WEIGHT)
        self.close()
        self.acknowledge()

    def ask(self) -> None:
        """Add a question about a random fact stated so far, and its answer."""
        if not self.stated:
            self.tell()
        fact = self.stated[int(self.rng.integers(len(self.stated)))]
        self.message(bpe.USER_ID, fact.question)
        self.answer(fact.answer_stem, fact.answer_value)


_TURNS: tuple[tuple[float, Callable[[Reports], None]], ...] = (
    (0.2, Reports.tell),
    (0.7, Reports.ask),
    (0.1, lambda window: window.fill(longest=200)),
)


def report_window(
    rng: np.random.Generator, corpus: Corpus, tokenizer: Tokenizer, length: int
) -> tuple[list[int], list[float]]:
    """Return ``length`` ids and weights of reports, other text, and questions about the reports."""
    return complete(Reports(rng=rng, tokenizer=tokenizer, corpus=corpus, chat=True), _TURNS, length)
