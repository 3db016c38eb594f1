"""Measurement of whether a model is suited to endless generation: the loss of a text of which only a window is visible.

Models that were trained with a first token at every beginning park attention on it, an *attention sink*. Without it
their loss is much higher (StreamingLLM: Xiao et al. 2024, §3.1). Models with learned sinks need no token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import log
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine import Model
from engine.rolling import RollingWindow, default_sinks

LEAST_KNOWLEDGE: Final = 0.5
"""Nats per token by which the loss must be lower than that of guessing: those of random weights are all higher."""
CLOSE: Final = 0.1
"""Nats per token by which any window may raise the loss, whether or not sinks are the reason that it is not more."""
LEAST_EFFECT: Final = 0.02
"""Nats per token that sinks must save if the window costs more: less cannot be told from noise in such a text."""
MOST_GAP: Final = 0.5
"""Nats per token by which a window with sinks may raise the loss; the model cannot use what it does not see."""


@dataclass(frozen=True)
class SinkReport:
    """Mean losses behind the window, in nats per token, and what follows from them.

    `losses` has the loss with everything visible (`dense`), and those with a window and the first 0, 1 and
    `rolling.sinks` tokens. `allows_sinks` is False for models with learned sinks, or with windows in all layers.
    """

    losses: Mapping[str, float]
    rolling: RollingWindow
    tokens: int
    vocab_size: int
    allows_sinks: bool

    @property
    def effect(self) -> float:
        """Nats per token that the sinks save."""
        return self.losses["0"] - self.losses[str(self.rolling.sinks)]

    @property
    def gap(self) -> float:
        """Nats per token that the window costs, with sinks."""
        return self.losses[str(self.rolling.sinks)] - self.losses["dense"]

    @property
    def problem(self) -> str:
        """Reason for which the model is unsuited; empty if it is suited."""
        sinks, window = self.rolling.sinks, self.rolling.window
        if self.losses["dense"] > log(self.vocab_size) - LEAST_KNOWLEDGE:
            return (
                f"it cannot predict such text: its loss is {self.losses['dense']:.3f} nats per token, expected at most "
                f"{log(self.vocab_size) - LEAST_KNOWLEDGE:.3f}, which is {LEAST_KNOWLEDGE} less than guessing has"
            )
        if self.gap <= CLOSE:
            return ""
        if self.allows_sinks and not sinks:
            return (
                f"a window of {window} tokens without first tokens raises the loss by {self.gap:.3f} nats per token, "
                f"expected at most {CLOSE}: keep some with --sinks"
            )
        if self.allows_sinks and self.effect < LEAST_EFFECT:
            return (
                f"it has no attention sinks: a window of {window} tokens raises the loss by {self.gap:.3f} nats per "
                f"token, and keeping the first {sinks} saves {self.effect:z.3f}, expected at least {LEAST_EFFECT}"
            )
        if self.gap > MOST_GAP:
            return (
                f"a window of {window} tokens raises the loss by {self.gap:.3f} nats per token, expected at most "
                f"{MOST_GAP}: try a longer window"
            )
        return ""


def measured_windows(rolling: RollingWindow) -> dict[str, RollingWindow | None]:
    """Return what is visible in each measurement: everything, and the window with 0, 1 and all of its sinks."""
    counts = sorted({0, min(1, rolling.sinks), rolling.sinks})
    return {"dense": None, **{str(count): replace(rolling, sinks=count) for count in counts}}


def token_losses(logits: NDArray[np.float32], ids: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return the loss of each token after the first, in nats."""
    rows = logits[:-1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    chosen: NDArray[np.float64] = np.log(np.exp(rows).sum(axis=1)) - rows[np.arange(len(rows)), ids[1:]]
    return chosen


def check_sinks(
    model: Model, ids: NDArray[np.int32], rolling: RollingWindow, progress: Callable[[int], None] = lambda _: None
) -> SinkReport:
    """Measure the losses of a text behind the window; `progress` is called with the number of those that are done.

    Raises `InvalidBatch` for ids that the model does not have.
    """
    losses = {}
    for done, (name, visible) in enumerate(measured_windows(rolling).items(), 1):
        losses[name] = float(token_losses(model.score(ids, visible), ids)[rolling.window :].mean())
        progress(done)
    config = model.config
    return SinkReport(losses, rolling, len(ids), config.vocab_size, default_sinks(config) > 0)
