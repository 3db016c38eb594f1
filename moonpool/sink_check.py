"""Is a model suited to endless generation? Measured by the loss of a text of which only a window is visible.

Models that were trained with a first token at every beginning park attention on it, an *attention sink*; without it
their loss collapses (StreamingLLM: Xiao et al. 2024, §3.1). Models with learned sinks need no token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine import Model
from engine.rolling import RollingWindow

BLOCK_TOKENS: Final = 16
LEAST_EFFECT: Final = 0.02
"""Nats per token by which sinks must lower the loss: less cannot be told from noise in a text of this length."""
MOST_GAP: Final = 0.5
"""Nats per token by which a window may raise the loss; it cannot know what it does not see."""


@dataclass(frozen=True)
class SinkReport:
    """Mean losses behind the window, in nats per token, and what follows from them.

    `losses` has the loss with everything visible (`dense`) and with a window and so many of the first tokens.
    """

    losses: Mapping[str, float]
    window: int
    sinks: int
    tokens: int
    vocab_size: int
    has_learned_sinks: bool

    @property
    def effect(self) -> float:
        """Nats per token that the sinks save."""
        return self.losses["0"] - self.losses[str(self.sinks)]

    @property
    def gap(self) -> float:
        """Nats per token that the window costs, with sinks."""
        return self.losses[str(self.sinks)] - self.losses["dense"]

    @property
    def problem(self) -> str:
        """Reason for which the model is unsuited; empty if it is suited."""
        if self.losses["dense"] >= log(self.vocab_size):
            return (
                f"it does not know such text: its loss is {self.losses['dense']:.3f} nats per token, and guessing has "
                f"{log(self.vocab_size):.3f}"
            )
        if not self.has_learned_sinks and self.effect < LEAST_EFFECT:
            return (
                f"it has no attention sinks: keeping its first tokens lowers the loss by {self.effect:.3f} nats per "
                f"token, expected at least {LEAST_EFFECT}"
            )
        if self.gap > MOST_GAP:
            return (
                f"with sinks and a window of {self.window} tokens, its loss is {self.gap:.3f} nats per token higher "
                f"than with everything visible, expected at most {MOST_GAP}: try a longer window"
            )
        return ""


def modes_of(window: int, sinks: int, slide: int) -> dict[str, RollingWindow | None]:
    """Return what is visible in each measurement: everything, and the window after 0, 1 and `sinks` first tokens."""
    counts = sorted({0, min(1, sinks), sinks})
    return {"dense": None, **{str(count): RollingWindow(count, window, slide, BLOCK_TOKENS) for count in counts}}


def token_losses(logits: NDArray[np.float32], ids: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return the loss of each token after the first, in nats."""
    rows = logits[:-1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    chosen: NDArray[np.float64] = np.log(np.exp(rows).sum(axis=1)) - rows[np.arange(len(rows)), ids[1:]]
    return chosen


def check_sinks(
    model: Model, ids: NDArray[np.int32], window: int, sinks: int, progress: Callable[[int], None] = lambda _: None
) -> SinkReport:
    """Measure the losses of a text behind the window; `progress` is called with the number of those that are done.

    A model with learned sinks, or with windows in all layers, is measured without others.
    """
    if model.config.attention_sinks or 0 not in model.config.layer_windows:
        sinks = 0
    losses = {}
    for done, (name, rolling) in enumerate(modes_of(window, sinks, BLOCK_TOKENS).items(), 1):
        losses[name] = float(token_losses(model.score(ids, rolling), ids)[window:].mean())
        progress(done)
    config = model.config
    return SinkReport(losses, window, sinks, len(ids), config.vocab_size, config.attention_sinks)
