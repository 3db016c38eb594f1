"""Reading windows: passages, questions about them in other words, and questions that need no passage."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from tools.training import knowledge, passages
from tools.training import tokenizer as bpe
from tools.training.corpus import Corpus
from tools.training.passages import QuestionAnswer, Statement
from tools.training.transcript import ANSWER_WEIGHT, Transcript, complete
from tools.training.words import SYSTEM_PROMPTS

CHAT_SHARE = 0.8
LONGEST_QUOTE = 160
"""Characters of a verse or gloss that an answer repeats."""

INTRODUCTIONS = (
    "",
    "",
    "",
    "Read this: ",
    "Here is a text: ",
    "Text:\n",
    "Remember this: ",
    "Please note: ",
    "Context: ",
)
RULES = ("Answer the question.", "Answer with a full sentence.", "Use the text to answer.", "Answer from the text.")


@dataclass(kw_only=True)
class Reading(Transcript):
    """Builder of a reading window. ``stated``: all statements so far, none of which contradicts another."""

    stated: list[Statement] = field(default_factory=list)

    def passage(self) -> str:
        """Return a new passage, whose statements can be asked about from now on."""
        most = int(np.exp(self.rng.uniform(np.log(1.5), np.log(16))))
        taken = {(statement.relation.name, statement.subject) for statement in self.stated}
        groups = [
            [one for one in group if (one.relation.name, one.subject) not in taken]
            for group in passages.draw_passage(self.rng, most, held_out=False)
        ]
        groups = [group for group in groups if group]
        self.stated += [statement for group in groups for statement in group]
        return passages.text_of(self.rng, groups)

    def user_text(self, text: str) -> None:
        self.message(bpe.USER_ID, text if self.chat else f"{text}\n")

    def put(self, question: QuestionAnswer) -> None:
        """Add a question and its answer."""
        if self.chat:
            self.message(bpe.USER_ID, question.text)
            self.answer("", question.answer)
        else:
            self.text(f"Question: {question.text}\nAnswer:")
            self.text(f" {question.answer}\n", ANSWER_WEIGHT)

    def tell(self) -> None:
        """Add a passage that the assistant acknowledges."""
        self.user_text(self.pick(INTRODUCTIONS) + self.passage())
        self.acknowledge()

    def tell_and_ask(self) -> None:
        """Add a passage and a question about it in one message."""
        text = self.passage()
        if not self.stated:
            return
        question = passages.ask(self.rng, self.stated)
        if not self.chat:
            self.user_text(text)
            self.put(question)
            return
        between = self.pick(("\n", "\n\n", " ", "\nQuestion: "))
        order = f"{self.pick(INTRODUCTIONS)}{text}{between}{question.text}"
        if self.rng.random() < 0.15:
            order = f"{question.text}\n{text}"
        self.put(QuestionAnswer(order, question.answer))

    def ask(self) -> None:
        """Add a question about anything stated so far."""
        if self.stated:
            self.put(passages.ask(self.rng, self.stated))
        else:
            self.tell_and_ask()

    def quote(self) -> None:
        """Add lines of the Bible or of the dictionary, and questions what they say."""
        source, form = (("kjv", "What does {} say?"), ("wordnet", "What does {} mean?"))[int(self.rng.integers(2))]
        lines = self.corpus.lines(self.rng, self.tokenizer, source, int(self.rng.integers(2, 7)))
        self.user_text(self.pick(INTRODUCTIONS) + "\n".join(lines))
        self.acknowledge()
        for line in self.rng.permutation(np.array(lines, dtype=object))[:2]:
            key, _, text = str(line).partition(" " if source == "kjv" else ": ")
            text = text if source == "kjv" else text.split(";")[0]
            if key and text and len(text) <= LONGEST_QUOTE:
                self.put(QuestionAnswer(form.format(key.split(",")[0]), text))

    def know(self) -> None:
        """Add a question that needs no passage."""
        self.put(knowledge.ask(self.rng, self.corpus.definitions))

    def talk(self) -> None:
        """Add small talk."""
        greeting, reply = knowledge.SMALL_TALK[int(self.rng.integers(len(knowledge.SMALL_TALK)))]
        self.put(QuestionAnswer(greeting, reply))


_TURNS: tuple[tuple[float, Callable[[Reading], None]], ...] = (
    (0.14, Reading.tell),
    (0.20, Reading.tell_and_ask),
    (0.36, Reading.ask),
    (0.03, lambda window: window.fill(longest=300)),
    (0.05, Reading.quote),
    (0.17, Reading.know),
    (0.05, Reading.talk),
)


def reading_window(
    rng: np.random.Generator, corpus: Corpus, tokenizer: Tokenizer, length: int
) -> tuple[list[int], list[float]]:
    """Return ``length`` ids and weights of passages and questions."""
    window = Reading(rng=rng, tokenizer=tokenizer, chat=bool(rng.random() < CHAT_SHARE), corpus=corpus)
    if window.chat and rng.random() < 0.4:
        prompt = window.pick((*SYSTEM_PROMPTS, *RULES))
        window.message(bpe.SYSTEM_ID, f"{prompt}\n{window.passage()}" if rng.random() < 0.4 else prompt)
    return complete(window, _TURNS, length)
