"""Which work is measured. Pure."""

from dataclasses import dataclass

from moonpool.errors import ConfigError

__all__ = ["Grid", "Point", "grid_of"]

_LEAST_NEW = 16


@dataclass(frozen=True)
class Point:
    """Work that was done some times: its median and shortest, in seconds. `x`: (new, reused) or (batch, context)."""

    x: tuple[int, int]
    median_s: float
    least_s: float


@dataclass(frozen=True)
class Grid:
    """`prefills`: (new, reused) tokens; `steps`: (batch, tokens of context of each sequence)."""

    prefills: tuple[tuple[int, int], ...]
    steps: tuple[tuple[int, int], ...]


def grid_of(max_model_len: int, max_batch: int, capacity_tokens: int) -> Grid:
    """New tokens in powers of 2, 4 at least, after nothing, an eighth and half of the longest prompt; batches likewise.

    What does not fit into `capacity_tokens` of KV is left out. Raises ConfigError when too little is left to fit to.
    """
    longest = min(max_model_len - 1, capacity_tokens)
    news = [size for size in (_LEAST_NEW * 4**i for i in range(12)) if size < longest] + [longest]
    prefills = {(new, reused) for reused in (0, longest // 8, longest // 2) for new in news if new + reused <= longest}
    batches = sorted({min(2**i, max_batch) for i in range(0, 20, 1)})
    contexts = sorted({_LEAST_NEW, longest // 8, longest // 2, longest - 1})
    steps = {(batch, each) for batch in batches for each in contexts if batch * (each + 1) <= capacity_tokens}
    if len(prefills) < 4 or len(steps) < 4:
        raise ConfigError(
            f"there is room for prompts of {longest} tokens and {capacity_tokens} tokens of KV: too little to fit "
            f"costs to; expected a --max-model-len and --capacity-tokens of {16 * _LEAST_NEW} or more"
        )
    return Grid(tuple(sorted(prefills)), tuple(sorted(steps)))
