"""Decode steps as graphs: recorded once for each number of rows and form of attention, and replayed with other inputs.

A recorded step reads its inputs from static tensors, which all graphs share and which each step overwrites before its
replay. The number of rows is rounded up; rows of padding see no keys, write no KV, and what they yield is dropped. Slot
tables grow, so that they lie at the end of a buffer that has room for them.
"""

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from engine.backends.device_arrays import StaticArrays, row_arrays
from engine.backends.graph_recorder import GraphRecorder, RecordedGraph
from engine.backends.interface import RecordableAttention, RowPlaces, StepAttention
from engine.batch import FlatBatch, IntArray
from engine.cache import PagedCache
from engine.rope import RopeTable

MOST_ROWS: Final = 256
"""Rows of the largest step that is recorded: in larger ones, launches take a small part of the time."""
_FEW_ROWS = (1, 2, 4, 8)
_ROW_UNIT = 8
_MOST_INTEGERS = 1 << 22  # indices of a step: 16 MiB

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodeInputs:
    """Static inputs of a recorded step of N rows."""

    tokens: torch.Tensor  # int32 [N]
    places: RowPlaces


class DecodeGraphs:
    """Recorded decode steps over one cache, that of the last step."""

    def __init__(
        self,
        recorder: GraphRecorder,
        attention: RecordableAttention,
        rope: RopeTable,
        compute: Callable[[DecodeInputs, StepAttention, PagedCache], torch.Tensor],
        device: torch.device,
    ) -> None:
        """`compute` returns the last layer's output of a step, [N, d]."""
        self._recorder = recorder
        self._attention = attention
        self._rope = rope
        self._compute = compute
        self._device = device
        self._cache: weakref.ref[PagedCache] | None = None  # whose address the graphs contain
        self._graphs: dict[tuple[int, tuple[tuple[int, ...], ...]], RecordedGraph] = {}
        self._refused = set[int]()  # numbers of rows whose steps could not be recorded
        self._integers: StaticArrays | None = None
        self._turns: torch.Tensor | None = None  # float32: cosines and sines

    def run(self, plan: FlatBatch, cache: PagedCache) -> torch.Tensor | None:
        """Run a step by a graph, recorded now if there is none. Return its rows' output [N, d], which the next step
        overwrites, or None if it has to run without.
        """
        rows = len(plan.token_ids)
        if rows > MOST_ROWS or not _is_plain(plan):
            return None
        if self._cache is None or self._cache() is not cache:
            self._graphs.clear()
            self._refused.clear()
            self._cache = weakref.ref(cache)
        padded = padded_rows(rows)
        if padded in self._refused:
            return None
        attention = self._attention.plan(plan, cache, padded)
        cos, sin, angles = self._rope.rows(plan.rotations, plan.rotations != plan.positions)
        of_rows = row_arrays(plan, angles, cache.block_tokens)
        arrays = {name: _padded(array, padded, -1 if name == "slots" else 0) for name, array in of_rows.items()}
        arrays |= attention.arrays
        arrays["tables"] = arrays.pop("tables")  # to the end
        self._integers = self._integers or StaticArrays(_MOST_INTEGERS, self._device)
        if not self._integers.write(arrays):
            return None
        placed = self._integers.views(arrays)
        if plan.device_ids is not None:
            placed["tokens"][:rows] = plan.device_ids
        turns = self._turned(cos, sin, placed["angles"])
        key = padded, attention.form
        if key not in self._graphs:
            inputs = DecodeInputs(placed["tokens"], RowPlaces(turns[0], turns[1], placed["slots"], placed["offsets"]))
            step = self._attention.start(attention.form, placed, cache)
            try:
                self._graphs[key] = self._recorder.record(lambda: self._compute(inputs, step, cache))
            except RuntimeError as error:
                log.warning("decode steps of %d rows run without a CUDA graph: %s", padded, error)
                self._refused.add(padded)
                return None
        return self._graphs[key].replay()[:rows]

    def _turned(self, cos: torch.Tensor, sin: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Copy the rows' cosines and sines to where graphs read them, and return them, [2, ropes, N, head_dim // 2].

        The rotary table itself moves when it grows.
        """
        ropes, _, half = cos.shape
        if self._turns is None:
            self._turns = torch.empty(2 * ropes * MOST_ROWS * half, device=self._device)
        turns = self._turns[: 2 * ropes * len(angles) * half].view(2, ropes, len(angles), half)
        torch.index_select(cos, 1, angles, out=turns[0])
        torch.index_select(sin, 1, angles, out=turns[1])
        return turns


def padded_rows(rows: int) -> int:
    """Return the rows of the graph that computes so many, MOST_ROWS at most."""
    return next((few for few in _FEW_ROWS if rows <= few), -(-rows // _ROW_UNIT) * _ROW_UNIT)


def _is_plain(plan: FlatBatch) -> bool:
    """Return True if every chunk is one token, of which logits are wanted, and nothing else is."""
    rows = len(plan.token_ids)
    asks = plan.only_kv or plan.inputs is not None or plan.layer_inputs is not None
    return len(plan.sizes) == len(plan.logits_rows) == rows and not asks


def _padded(array: IntArray, rows: int, value: int = 0) -> IntArray:
    """Return [..., N] as [..., rows]."""
    out = np.full((*array.shape[:-1], rows), value, np.int32)
    out[..., : array.shape[-1]] = array
    return out
