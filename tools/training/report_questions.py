"""Questions about reports, as chats: `python -m tools.training.report_questions FILE --contexts N [--test]`.

The file has the format of `moonpool droidspeak profile`. Its facts are never stated in training. The sets for profiles
and for tests have no name in common. Between the reports stand passages of the licence of the bundled model, whose
text does not change.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tools.training import tokenizer as bpe
from tools.training.facts import Fact
from tools.training.reports import draw_report, text_of
from tools.training.words import ACKNOWLEDGEMENTS, NAMES

BUNDLED = Path(__file__).parents[2] / "moonpool" / "data" / "model"
SETS = {"profile": NAMES[::2], "test": NAMES[1::2]}
MOST_REPORTS = 6
"""Reports of a message, at most, as in training."""

Message = dict[str, str]


def report_chats(
    rng: np.random.Generator, tokenizer: Tokenizer, names: tuple[str, ...], questions: int, tokens: int
) -> Iterator[list[Message]]:
    """Yield chats with one context of `tokens` tokens or a few more, and each with another question and its answer.

    Each of `names` has one report. Raises ValueError if the reports need more tokens or state fewer facts.
    """
    others = tuple(name for name in NAMES if name not in names)
    stated, reports = list[Fact](), list[str]()
    for _ in names:
        report = draw_report(rng, {*others, *(fact.name for fact in stated)}, held_out=True)
        stated += report
        reports.append(text_of(report))
    if len(stated) < questions:
        raise ValueError(f"the reports of a context state {len(stated)} facts, fewer than the {questions} questions")
    words = (BUNDLED / "LICENSE").read_text(encoding="utf-8").split()
    passages = [""] * len(reports)
    while (missing := tokens - _num_tokens(tokenizer, messages := _context(reports, passages))) > 0:
        at, length = int(rng.integers(len(words) - 100)), int(rng.integers(8, 25))
        passages[int(rng.integers(len(passages)))] += " " + " ".join(words[at : at + min(length, missing)])
    if not any(passages):
        raise ValueError(f"the reports alone have more than {tokens} tokens")
    for index in rng.choice(len(stated), questions, replace=False):
        fact = stated[int(index)]
        answer = fact.answer_stem + fact.answer_value
        yield [*messages, {"role": "user", "content": fact.question}, {"role": "assistant", "content": answer}]


def _context(reports: list[str], passages: list[str]) -> list[Message]:
    """Return messages of reports, each followed by its passage, and their acknowledgements."""
    texts = [report + passage for report, passage in zip(reports, passages, strict=True)]
    found = list[Message]()
    for number, start in enumerate(range(0, len(texts), MOST_REPORTS)):
        found.append({"role": "user", "content": " ".join(texts[start : start + MOST_REPORTS])})
        found.append({"role": "assistant", "content": ACKNOWLEDGEMENTS[number % len(ACKNOWLEDGEMENTS)]})
    return found


def _num_tokens(tokenizer: Tokenizer, messages: list[Message]) -> int:
    """Return the tokens of the messages with BOS, roles and ends."""
    return 1 + sum(2 + len(bpe.encode(tokenizer, message["content"])) for message in messages)


def write_questions(path: Path, split: str, *, contexts: int, questions: int, tokens: int, seed: int = 21) -> None:
    """Write the chats of `contexts` contexts, `questions` each, of one of `SETS`. The same arguments, the same file."""
    rng = np.random.default_rng((seed, sorted(SETS).index(split)))
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    with path.open("w", encoding="utf-8") as file:
        for _ in range(contexts):
            for chat in report_chats(rng, tokenizer, SETS[split], questions, tokens):
                line: dict[str, Any] = {"messages": chat}
                file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--contexts", type=int, default=10)
    parser.add_argument("--questions", type=int, default=30, help="about each context")
    parser.add_argument("--tokens", type=int, default=1536, help="of each context")
    parser.add_argument("--test", action="store_true", help="the set for tests, not for profiles")
    given = parser.parse_args()
    split = "test" if given.test else "profile"
    write_questions(given.file, split, contexts=given.contexts, questions=given.questions, tokens=given.tokens)


if __name__ == "__main__":
    main()
