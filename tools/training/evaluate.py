"""Evaluation on text, passages and facts not seen in training. ``python -m tools.training.evaluate FOLDER``.

Measures: cross-entropy of held-out documents by position in a full window; exact match of questions about passages, and
of fact questions by the distance between fact and answer; what was memorised; attention sinks. Greedy decoding produces
an answer if and only if each of its tokens is the argmax under teacher forcing, so one forward pass per question
suffices.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional

from engine import ForwardBatch, SequenceChunk, load_model
from tools.training import knowledge, passages, sinks
from tools.training import tokenizer as bpe
from tools.training.corpus import Corpus
from tools.training.export import load, write
from tools.training.facts import Fact, draw_fact, values_of
from tools.training.model import Llama
from tools.training.prepare import CACHE
from tools.training.recall import Recall
from tools.training.sources import SOURCES
from tools.training.words import ATTRIBUTES, NAMES

EDGES = (0, 16, 64, 256, 512, 1024, 2048, 3072)
DISTANCES = (96, 128, 256, 512, 1024, 1900, 3800)
"""Those below 95 % of the model's positions are measured."""
FACTS_STATED = 4
FILLER_FRAME = 14
"""Tokens around the filler: role markers, opening words, and the acknowledgement."""
READING_QUESTIONS = 200
SINK_TOKENS = 1500
SEED = 7


Logits = Callable[[torch.Tensor], torch.Tensor]
"""Maps ids [1, tokens] to logits [1, tokens, vocabulary], as a model does."""


def text_losses(model: Llama, tokens: np.ndarray, windows: int) -> np.ndarray:
    """Return the losses of windows as long as the model's context; see `window_losses`."""
    return window_losses(model, tokens, windows, model.shape.positions - 1)


@torch.no_grad()
def window_losses(logits: Logits, tokens: np.ndarray, windows: int, context: int) -> np.ndarray:
    """Return the loss in nats of every target, [windows, context], over evenly spaced windows of one source.

    Each window starts with BOS.
    """
    starts = np.linspace(0, len(tokens) - context, windows).astype(int)
    losses = []
    for start in starts:
        ids = torch.tensor([[bpe.BOS_ID, *tokens[start : start + context].astype(np.int64)]])
        losses.append(functional.cross_entropy(logits(ids[:, :-1])[0], ids[0, 1:], reduction="none").numpy())
    return np.stack(losses)


@dataclass(frozen=True)
class Question:
    """Prompt and expected answer. ``distance``: number of tokens from the fact's value to the answer's value."""

    prompt: list[int]
    answer: list[int]
    distance: int


def build_question(
    rng: np.random.Generator, corpus: Corpus, tokenizer: Tokenizer, *, distance: int, same_attribute: bool, stated: bool
) -> Question:
    """Return a chat of facts never stated in training, held-out filler, and a question about one of the facts.

    With ``stated`` False, the fact in question is left out; this control measures guessing.
    """
    facts = _draw_facts(rng, same_attribute)
    asked = facts[int(rng.integers(len(facts)))]
    window = Recall(rng=rng, tokenizer=tokenizer, chat=True, corpus=corpus, length=bpe.MAX_POSITIONS)
    stated_at = 0
    for fact in facts:
        if stated or fact is not asked:
            window.message(bpe.USER_ID, fact.answer_stem + fact.answer_value)
        if fact is asked:
            stated_at = len(window.ids)
        window.acknowledge()
    tail = Recall(rng=rng, tokenizer=tokenizer, chat=True, corpus=corpus, length=bpe.MAX_POSITIONS, ids=[], weights=[])
    tail.message(bpe.USER_ID, asked.question)
    tail.open(bpe.ASSISTANT_ID)
    answer = bpe.encode(tokenizer, asked.answer_stem + asked.answer_value)
    spare = distance - (len(window.ids) - stated_at) - len(tail.ids) - len(answer) - FILLER_FRAME
    if spare > 0:
        window.open(bpe.USER_ID)
        window.text("Read this: ")
        window.tokens(corpus.filler(rng, spare))
        window.close()
        window.acknowledge()
    prompt = window.ids + tail.ids
    return Question(prompt, answer, len(prompt) - stated_at + len(answer))


def _draw_facts(rng: np.random.Generator, same_attribute: bool) -> list[Fact]:
    if not same_attribute:
        taken, facts = set[tuple[str, str]](), list[Fact]()
        while len(facts) < FACTS_STATED:
            fact = draw_fact(rng, taken=taken, held_out=True)
            if fact is not None:
                taken.add(fact.key)
                facts.append(fact)
        return facts
    attribute = tuple(ATTRIBUTES)[rng.integers(len(ATTRIBUTES))]
    drawn = (
        Fact(attribute, str(name), str(value))
        for name in rng.permutation(NAMES)
        for value in rng.permutation(values_of(attribute))[:12]
    )
    chosen: dict[tuple[str, str], Fact] = {}
    for fact in drawn:
        if fact.held_out and fact.value not in {other.value for other in chosen.values()}:
            chosen.setdefault(fact.key, fact)
        if len(chosen) == FACTS_STATED:
            break
    return list(chosen.values())


@torch.no_grad()
def is_exact(model: Llama, question: Question) -> bool:
    """Return True if greedy decoding produces the whole answer, including value and full stop."""
    ids = torch.tensor([question.prompt + question.answer])
    logits = model(ids)[0, len(question.prompt) - 1 : -1]
    return bool((logits.argmax(-1) == torch.tensor(question.answer)).all())


def recall_table(model: Llama, corpus: Corpus, tokenizer: Tokenizer, questions: int) -> list[dict[str, float]]:
    """Return the share of exact answers per distance: mixed attributes, equal attributes, and without the fact."""
    kinds = {"mixed": (False, True), "same_attribute": (True, True), "fact_absent": (False, False)}
    rows = []
    for distance in (each for each in DISTANCES if each < 0.95 * model.shape.positions):
        rng = np.random.default_rng((SEED, distance))
        row: dict[str, float] = {"distance": distance}
        for kind, (same, stated) in kinds.items():
            asked = [
                build_question(rng, corpus, tokenizer, distance=distance, same_attribute=same, stated=stated)
                for _ in range(questions)
            ]
            row[kind] = round(sum(is_exact(model, question) for question in asked) / questions, 3)
        rows.append(row)
    return rows


Asking = Callable[[np.random.Generator, list[passages.Statement]], passages.QuestionAnswer | None]


def reading_questions(rng: np.random.Generator, tokenizer: Tokenizer, count: int, ask: Asking) -> list[Question]:
    """Return chats of one message: a passage of 3 to 12 statements never made in training, and what ``ask`` asks."""
    asked = list[Question]()
    while len(asked) < count:
        stated = passages.draw_passage(rng, int(rng.integers(3, 13)), held_out=True)
        every = [statement for group in stated for statement in group]
        about = ask(rng, every) if every else None
        if about is not None:
            asked.append(_chat(tokenizer, f"{passages.text_of(rng, stated)}\n{about.text}", about.answer))
    return asked


def ask_stated(rng: np.random.Generator, stated: list[passages.Statement]) -> passages.QuestionAnswer:
    """Return a question about one of the statements, which answers it."""
    return passages.ask_about(rng, stated[int(rng.integers(len(stated)))], stated)


def _chat(tokenizer: Tokenizer, message: str, answer: str) -> Question:
    prompt = [bpe.BOS_ID, bpe.USER_ID, *bpe.encode(tokenizer, message), bpe.EOS_ID, bpe.ASSISTANT_ID]
    return Question(prompt, [*bpe.encode(tokenizer, answer), bpe.EOS_ID], 0)


def share_exact(model: Llama, questions: list[Question]) -> float:
    """Return the share of questions that greedy decoding answers exactly, end of message included."""
    return round(sum(is_exact(model, question) for question in questions) / len(questions), 3)


def reading_table(model: Llama, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, float]:
    """Return the shares of exact answers to questions about passages, and to questions that need none."""
    rng = np.random.default_rng(SEED)
    known = [knowledge.definition(noun, text) for noun, text in corpus.definitions]
    drawn = [knowledge.ask(rng, ()) for _ in range(READING_QUESTIONS)]
    return {
        "passage": share_exact(model, reading_questions(rng, tokenizer, READING_QUESTIONS, ask_stated)),
        "not_in_passage": share_exact(
            model, reading_questions(rng, tokenizer, READING_QUESTIONS, passages.ask_unanswered)
        ),
        "definitions": share_exact(model, [_chat(tokenizer, one.text, one.answer) for one in known]),
        "other_knowledge": share_exact(model, [_chat(tokenizer, one.text, one.answer) for one in drawn]),
    }


def sink_report(model: Llama, tokens: np.ndarray) -> dict[str, object]:
    """Return the attention that BOS receives past position 256, by layer, and losses with a window of 256 tokens."""
    ids = torch.tensor([[bpe.BOS_ID, *tokens[:SINK_TOKENS].astype(np.int64)]])
    losses = {str(count): round(sinks.window_loss(model, ids, window=256, sinks=count), 3) for count in (0, 1, 4)}
    every = round(sinks.window_loss(model, ids, window=256, sinks=SINK_TOKENS), 3)
    masses = [round(mass, 3) for mass in sinks.mass_by_layer(model, ids[:, :1024], 256)]
    return {"mass_by_layer": masses, "window_nats_by_sinks": losses, "full_attention_nats": every}


def int8_report(folder: Path, model: Llama, sources: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the loss as training computes it and as the engine serves it, on one window of each source.

    For a model that was not trained in int8, also its loss after weights, activations and KV are rounded to int8.
    """
    ways: dict[str, Logits] = {"nats_in_training": model, "nats_served": _served(folder)}
    if not model.shape.int8:
        rounded = Llama(replace(model.shape, int8=True))
        rounded.load_state_dict(model.state_dict())
        with tempfile.TemporaryDirectory() as name:
            write(rounded, folder, Path(name))
            ways["nats_served_after_rounding"] = _served(Path(name))
    context = model.shape.positions // 2

    def loss(logits: Logits) -> float:
        return float(np.mean([window_losses(logits, tokens, 1, context) for tokens in sources]))

    return {key: round(loss(logits), 4) for key, logits in ways.items()}


def _served(folder: Path) -> Logits:
    engine, block_tokens = load_model(folder, threads=1), 16

    def logits(ids: torch.Tensor) -> torch.Tensor:
        table = np.arange(-(-ids.shape[1] // block_tokens), dtype=np.int32)
        groups = len(engine.kv_groups)
        cache = engine.new_cache((len(table),) * groups, block_tokens)
        chunk = SequenceChunk(ids[0].numpy().astype(np.int32), 0, (table,) * groups, want_logits=True, every=True)
        return engine.forward(ForwardBatch([chunk]), cache)[None]

    return logits


def evaluate(folder: Path, cache: Path, *, windows: int, questions: int) -> dict[str, object]:
    """Return all measures of the model in ``folder`` as JSON-compatible data."""
    model, tokenizer = load(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    corpus = Corpus.load(cache / "data", "held")
    manifest = json.loads((cache / "data" / "manifest.json").read_text())
    report: dict[str, object] = {"windows_per_source": windows, "questions_per_cell": questions}
    for source, tokens in zip(SOURCES, corpus.tokens, strict=True):
        losses = text_losses(model, tokens, windows)
        entry = manifest[f"{source.name}.held.npy"]
        edges = [*(edge for edge in EDGES if edge < losses.shape[1]), losses.shape[1]]
        by_position = {f"{low}-{high}": round(float(losses[:, low:high].mean()), 3) for low, high in pairwise(edges)}
        bits = losses.mean() / np.log(2) * entry["tokens"] / entry["characters"]
        report[source.name] = {
            "nats_per_token": round(float(losses.mean()), 3),
            "bits_per_character": round(float(bits), 3),
            "nats_by_position": by_position,
        }
    report["reading_exact_match"] = reading_table(model, corpus, tokenizer)
    if not model.shape.sinks:  # learned ones are no tokens
        report["sinks"] = sink_report(model, corpus.tokens[0])
    report["int8"] = int8_report(folder, model, corpus.tokens)
    report["recall_exact_match"] = recall_table(model, corpus, tokenizer, questions)
    return report


def main() -> None:
    """Run the command line; prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--windows", type=int, default=5, help="windows of all positions from each source")
    parser.add_argument("--questions", type=int, default=64, help="questions for each distance and kind")
    given = parser.parse_args()
    torch.set_num_threads(1)
    report = evaluate(given.folder, given.cache, windows=given.windows, questions=given.questions)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
