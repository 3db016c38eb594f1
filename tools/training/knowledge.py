"""Questions that need no passage: small talk, capitals, opposites, small sums, and definitions of nouns.

It is the same in training and in evaluation: it measures what was memorised. Definitions are WordNet's.
"""

from collections.abc import Callable

import numpy as np

from tools.training.passages import QuestionAnswer
from tools.training.vocabulary import DAYS, MONTHS, pick
from tools.training.words import GREETINGS

SMALL_TALK = (
    *GREETINGS,
    ("Hello!", "Hello. What can I do for you?"),
    ("Hi.", "Hello. What can I do for you?"),
    ("Hi!", "Hello. What can I do for you?"),
    ("Good evening.", "Good evening. How can I help?"),
    ("What are you?", "I am a small language model. I can remember what you tell me in this conversation."),
    ("What is your name?", "I have no name. I am a small language model."),
    ("How are you?", "I am well. What can I do for you?"),
    ("Can you help me?", "I can answer questions about a text that you give me, and explain some common words."),
    ("Who made you?", "I was trained for Moonpool, on a small computer."),
    ("What is Moonpool?", "Moonpool is a cluster that serves language models. It keeps their KV cache in a pool."),
    ("Thank you!", "You are welcome."),
    ("Thanks.", "You are welcome."),
    ("Bye.", "Goodbye."),
)

CAPITALS = (
    ("France", "Paris"), ("England", "London"), ("Italy", "Rome"), ("Germany", "Berlin"), ("Spain", "Madrid"),
    ("Austria", "Vienna"), ("Norway", "Oslo"), ("Egypt", "Cairo"), ("Portugal", "Lisbon"), ("Greece", "Athens"),
    ("Ireland", "Dublin"), ("Japan", "Tokyo"), ("Sweden", "Stockholm"), ("Denmark", "Copenhagen"), ("Poland", "Warsaw"),
    ("Russia", "Moscow"), ("China", "Beijing"), ("Finland", "Helsinki"), ("Hungary", "Budapest"), ("Turkey", "Ankara"),
    ("Cuba", "Havana"), ("Peru", "Lima"), ("Kenya", "Nairobi"), ("Belgium", "Brussels"), ("Switzerland", "Bern"),
    ("Bulgaria", "Sofia"), ("Latvia", "Riga"), ("Estonia", "Tallinn"), ("Canada", "Ottawa"), ("Israel", "Jerusalem"),
)  # fmt: skip

OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("good", "bad"), ("light", "dark"), ("old", "young"), ("fast", "slow"),
    ("high", "low"), ("long", "short"), ("rich", "poor"), ("strong", "weak"), ("wet", "dry"), ("day", "night"),
    ("open", "closed"), ("right", "wrong"), ("up", "down"), ("left", "right"), ("full", "empty"), ("early", "late"),
    ("hard", "soft"), ("true", "false"), ("black", "white"), ("first", "last"), ("near", "far"), ("happy", "sad"),
)  # fmt: skip

Definitions = tuple[tuple[str, str], ...]
"""Pairs of a noun and its definition, without article and full stop."""


def article(noun: str) -> str:
    """Return the noun with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def ask(rng: np.random.Generator, definitions: Definitions) -> QuestionAnswer:
    """Return a question that the model is to answer without a passage; not about definitions if there are none."""
    kinds: tuple[tuple[float, Callable[[], QuestionAnswer]], ...] = (
        (0.5 if definitions else 0.0, lambda: _definition(rng, definitions)),
        (0.15, lambda: _capital(rng)),
        (0.1, lambda: _opposite(rng)),
        (0.15, lambda: _sum(rng)),
        (0.1, lambda: _next(rng)),
    )
    shares = np.array([share for share, _ in kinds])
    return kinds[int(rng.choice(len(kinds), p=shares / shares.sum()))][1]()


def definition(noun: str, text: str, form: str = "What is {a}?") -> QuestionAnswer:
    """Return the question what the noun means."""
    answer = f"{article(noun)} is {text}."
    return QuestionAnswer(form.format(a=article(noun), noun=noun), answer[0].upper() + answer[1:])


def _definition(rng: np.random.Generator, definitions: Definitions) -> QuestionAnswer:
    forms = (
        "What is {a}?",
        "What is {a}?",
        "What does {noun} mean?",
        "Tell me about the {noun}.",
        "Explain the word {noun}.",
    )
    noun, text = definitions[int(rng.integers(len(definitions)))]
    return definition(noun, text, pick(rng, forms))


def _capital(rng: np.random.Generator) -> QuestionAnswer:
    country, town = CAPITALS[int(rng.integers(len(CAPITALS)))]
    return QuestionAnswer(f"What is the capital of {country}?", f"The capital of {country} is {town}.")


def _opposite(rng: np.random.Generator) -> QuestionAnswer:
    word, other = OPPOSITES[int(rng.integers(len(OPPOSITES)))]
    return QuestionAnswer(f"What is the opposite of {word}?", f"The opposite of {word} is {other}.")


def _sum(rng: np.random.Generator) -> QuestionAnswer:
    first, second = (int(number) for number in rng.integers(0, 11, 2))
    if rng.random() < 0.6:
        return QuestionAnswer(f"What is {first} plus {second}?", f"{first} plus {second} is {first + second}.")
    return QuestionAnswer(f"What is {first + second} minus {second}?", f"{first + second} minus {second} is {first}.")


def _next(rng: np.random.Generator) -> QuestionAnswer:
    what, row = (("day", DAYS), ("month", MONTHS))[int(rng.integers(2))]
    index, later = int(rng.integers(len(row))), rng.random() < 0.5
    found = row[(index + (1 if later else -1)) % len(row)]
    order = "after" if later else "before"
    return QuestionAnswer(f"Which {what} comes {order} {row[index]}?", f"The {what} {order} {row[index]} is {found}.")
