"""Sinks and a rolling window: what an endless sequence keeps in the cache, and at which positions. Pure.

Its first tokens stay as attention sinks, its last ones are visible through a window (StreamingLLM: Xiao et al. 2024,
§3.2) that slides by several blocks at once. What a token sees depends on its position alone, so a sequence that is
computed again, in any chunks, has the same KV. Positions are those within the cache: the sinks directly precede the
window. Keys are cached as they were rotated, so a slide only rotates the sinks' keys: a common rotation of a query and
the keys of its window does not change their products.
"""

from dataclasses import dataclass
from typing import Final

from engine.config import ModelConfig
from engine.errors import InvalidBatch

DEFAULT_SINKS: Final = 4  # StreamingLLM, Table 2


@dataclass(frozen=True, slots=True)
class RollingWindow:
    """The first `sinks` tokens, and a window of `window` tokens that slides by `slide` tokens when it is full.

    Until the first slide, a sequence has the slots of its blocks. Afterwards its first slot is the sinks': the first
    rows are theirs, unrotated by slides, and so are the last ones, rotated to the positions before the window; the
    other rows are unused. The following slots are those of the window. Layers with windows of their own see no sinks
    after the first slide. Raises `InvalidBatch`.
    """

    sinks: int
    window: int
    slide: int
    block_tokens: int

    def __post_init__(self) -> None:
        if not 0 <= self.sinks <= self.block_tokens // 2:
            raise InvalidBatch(
                f"sinks must be in 0..{self.block_tokens // 2}, half of a block of {self.block_tokens} tokens, "
                f"got {self.sinks}"
            )
        if self.slide < self.block_tokens or self.slide % self.block_tokens:
            raise InvalidBatch(f"slide must be whole blocks of {self.block_tokens} tokens, got {self.slide}")
        if self.window <= self.slide or self.window % self.block_tokens:
            raise InvalidBatch(
                f"window must be whole blocks of {self.block_tokens} tokens and more than slide ({self.slide}), "
                f"got {self.window}"
            )

    def start(self, position: int) -> int:
        """Return the first token in the window of a token at `position`; 0 before the first slide."""
        return 0 if position < self.window else ((position - self.window) // self.slide + 1) * self.slide

    def end(self, position: int) -> int:
        """Return the position at which the window slides after `position`; no chunk may contain both."""
        return self.start(position) + self.window

    @property
    def capacity(self) -> int:
        """Tokens for which a sequence needs slots at most, those of the sinks' slot included."""
        return self.window + self.block_tokens


def default_sinks(config: ModelConfig) -> int:
    """Return the number of first tokens that stay visible if a request does not say: 0 for models that allow none."""
    return 0 if _sinks_problem(config) else DEFAULT_SINKS


def least_window(config: ModelConfig, block_tokens: int) -> int:
    """Return the tokens that a rolling window must have at least: a block more than the model's own windows.

    Layers with windows of their own see no sinks. A model that has windows in all layers allows any rolling window.
    """
    return block_tokens + (max(config.layer_windows) if 0 in config.layer_windows else 0)


def check_rolling(config: ModelConfig, rolling: RollingWindow) -> None:
    """Raise InvalidBatch, with a message that begins with the field, if a rolling window does not suit the model."""
    if rolling.sinks and (problem := _sinks_problem(config)):
        raise InvalidBatch(f"sinks must be 0, since {problem}, got {rolling.sinks}")
    if rolling.window < (least := least_window(config, rolling.block_tokens)):
        raise InvalidBatch(
            f"window must be at least {least} tokens, a block more than the model's own windows, got {rolling.window}"
        )


def _sinks_problem(config: ModelConfig) -> str:
    """Return why a model allows no first tokens as sinks; empty if it does."""
    if config.attention_sinks:
        return "the model has learned sinks"
    return "" if 0 in config.layer_windows else "all layers of the model have windows"
