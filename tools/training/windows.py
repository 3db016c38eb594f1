"""Training windows: text from the token files, reading, recall and report windows, and copy windows."""

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from tools.training import tokenizer as bpe
from tools.training.corpus import Corpus
from tools.training.reading import reading_window
from tools.training.recall import recall_window
from tools.training.reports import report_window


@dataclass(frozen=True)
class Mixture:
    """Shares of the kinds of windows; the rest is text."""

    reading: float
    recall: float
    copy: float
    reports: float = 0.0


def copy_window(rng: np.random.Generator, corpus: Corpus, length: int) -> list[int]:
    """Return repetitions of a span of 8 to 128 tokens, shuffled in half of the windows; these teach copying quickly."""
    span = np.array(corpus.span(rng, int(np.exp(rng.uniform(np.log(8), np.log(128))))))
    if rng.random() < 0.5:
        rng.shuffle(span)
    return [bpe.BOS_ID, *(int(token) for token in np.resize(span, length - 1))]


def batch(
    rng: np.random.Generator, corpus: Corpus, tokenizer: Tokenizer, *, windows: int, context: int, mixture: Mixture
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs, targets (int64) and target weights (float32), each [windows, context]."""
    ids = np.empty((windows, context + 1), np.int64)
    weights = np.ones((windows, context + 1), np.float32)
    for row in range(windows):
        drawn = rng.random()
        if drawn < mixture.reading:
            ids[row], weights[row] = reading_window(rng, corpus, tokenizer, context + 1)
        elif drawn < mixture.reading + mixture.recall:
            ids[row], weights[row] = recall_window(rng, corpus, tokenizer, context + 1)
        elif drawn < mixture.reading + mixture.recall + mixture.copy:
            ids[row] = copy_window(rng, corpus, context + 1)
        elif drawn < mixture.reading + mixture.recall + mixture.copy + mixture.reports:
            ids[row], weights[row] = report_window(rng, corpus, tokenizer, context + 1)
        else:
            ids[row] = [bpe.BOS_ID, *corpus.span(rng, context)]
    return ids[:, :-1], ids[:, 1:], weights[:, 1:]
