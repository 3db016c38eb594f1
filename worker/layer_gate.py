"""Gate before each layer of a prompt's steps: a layer is computed once that layer of all preceding blocks is there.

Blocks arrive from other members of a prefill group (`prefill_node.group_member`) or from pool nodes
(`worker.kv_loading`). A step that has begun waits at the gate for layers that are still on their way.

Threads (`_came` is the only lock, and nothing is called while it is held):

  engine thread      is_ready, is_open, wait
  producers          mark, lose: the verifier thread, the event loop or the engine thread
  event loop         idle_s, complete

The arrivals, `_error` and `_last_s` change under `_came`. `is_ready` and `is_open` read them without it: they only move
towards ready, so a stale value delays a step by one wake-up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from worker.errors import RequestFailed
from worker.policy.layer_arrivals import LayerArrivals

_LOOK_S: Final = 0.02  # between two looks whether a waiting step must give up


class LayerGate:
    """Gate of one prompt on one node."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        *,
        held_blocks: int,
        stall_s: float,
        lost: Callable[[str], RequestFailed],
        changed: Callable[[], None],
    ) -> None:
        """Blocks [0, num_blocks) of the prompt may be needed; blocks [0, held_blocks) are present.

        `required` is the number of leading blocks that the next step needs, None if none is to begin yet. A step waits
        until `stall_s` after the last arrival. `lost(why)` creates the error that ends the wait; `changed()` is called
        when the next step may begin, or never will.
        """
        self.required: int | None = None
        self._arrivals = LayerArrivals(num_layers, num_blocks, held_blocks=held_blocks)
        self._stall_s = stall_s
        self._lost = lost
        self._changed = changed
        self._error: RequestFailed | None = None
        self._came = threading.Condition()
        self._last_s = time.monotonic()

    def require(self, num_blocks: int) -> None:
        """Let steps begin that need the first `num_blocks` blocks."""
        with self._came:
            self.required = num_blocks
            self._last_s = time.monotonic()

    # Engine thread.

    @property
    def error(self) -> RequestFailed | None:
        """The error that ends every wait; None while the KV may still arrive."""
        return self._error

    @property
    def is_ready(self) -> bool:
        """True if the first layer can be computed, or never will be."""
        return self._error is not None or self.has(0)

    @property
    def is_open(self) -> bool:
        """True if all layers can be computed without waiting."""
        return self._error is None and all(self.has(layer) for layer in reversed(range(self._arrivals.num_layers)))

    def has(self, layer: int) -> bool:
        """Return True if this layer of all required blocks is present."""
        return self.required is not None and self._arrivals.leading(layer) >= self.required

    def wait(self, layer: int, must_give_up: Callable[[], bool] | None = None) -> None:
        """Block until this layer of all required blocks is present. Raises the error of `lost`.

        Also gives up if `must_give_up()`, which is called now and then, returns True.
        """
        began_s = time.monotonic()
        while True:
            with self._came:
                if self._error is None and not self.has(layer):
                    left_s = max(began_s, self._last_s) + self._stall_s - time.monotonic()
                    if left_s <= 0:
                        self._error = self._lost(f"layer {layer} has not arrived for {self._stall_s:g} s")
                    else:
                        self._came.wait(left_s if must_give_up is None else min(left_s, _LOOK_S))
                if self._error is not None:
                    raise self._error
                if self.has(layer):
                    return
            if must_give_up is not None and must_give_up():
                self.lose(f"other sequences wait while layer {layer} is on its way")

    # Any thread.

    def mark(self, layers: Iterable[int], blocks: NDArray[np.int64]) -> bool:
        """Record verified layers of `blocks` as present. Returns False if the KV is lost."""
        with self._came:
            if self._error is not None:
                return False
            was_ready = self.is_ready
            for layer in layers:
                self._arrivals.mark(layer, blocks)
            self._last_s = time.monotonic()
            is_news = self.is_ready and not was_ready
            self._came.notify_all()
        if is_news:
            self._changed()
        return True

    def lose(self, why: str) -> None:
        """End all waits with an error. Does nothing if that has happened."""
        with self._came:
            if self._error is None:
                self._error = self._lost(why)
            self._came.notify_all()
        self._changed()

    @property
    def idle_s(self) -> float:
        """Seconds since the last arrival while a step is to begin and is not ready; 0 otherwise."""
        with self._came:
            waits = self._error is None and self.required is not None and not self.has(0)
            return time.monotonic() - self._last_s if waits else 0.0

    @property
    def complete(self) -> int:
        """Number of leading blocks with all layers present."""
        with self._came:
            return self._arrivals.complete
