"""The paced engine's slots: KV derived from token ids, written and verified in place."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvpool import KvSpec
from messenger import Messenger
from worker.paced.kernels import LAYER, ROWS, kernels
from worker.policy import WindowSlots
from worker.request import EngineSequence
from worker.slot_memory import EngineMemory

_WORD_NBYTES = 4


class PacedMemory(EngineMemory):
    """Slots in host memory only: pushed data arrives in place."""

    def __init__(self, spec: KvSpec, num_slots: int, messenger: Messenger, windows: WindowSlots | None = None) -> None:
        super().__init__(spec, num_slots, messenger, windows=windows)
        self._words = self._array.view(np.uint32)
        self._layers = [
            np.array([(layer, i * spec.layer_nbytes(g) // _WORD_NBYTES) for i, layer in enumerate(group.layers)], LAYER)
            for g, group in enumerate(spec.groups)
        ]

    def close(self) -> None:
        del self._words
        super().close()

    def write(
        self, sequence: EngineSequence, states: NDArray[np.uint64], start: int, end: int, layer: int | None
    ) -> None:
        """Write the KV of tokens [start, end), in one layer or in all. `states` has the states of the sequence's tokens
        up to `end`.
        """
        for group in range(self.num_groups):
            layers = self._layers[group]
            if layer is not None:
                own, index = self.place_of_layer[layer]
                if own != group:
                    continue
                layers = layers[index : index + 1]
            kernels().fill(self._words, *self._place(group, layers, sequence.table, states, start, end))

    def wrong_blocks(self, sequence: EngineSequence, states: NDArray[np.uint64], end: int) -> list[int]:
        """Return the sequence's blocks whose tokens [0, end) hold different KV than `write` would write.

        In windowed groups, only of tokens that the next one may see.
        """
        table = sequence.table  # may be replaced by a longer one meanwhile
        wrong = np.zeros(len(table), np.bool_)
        for group in range(self.num_groups):
            start = 0
            if self.windows is not None and group in self.spec.windowed:
                start = self.windows.first_seen(end // self.block_tokens) * self.block_tokens
            kernels().check(self._words, *self._place(group, self._layers[group], table, states, start, end), wrong)
        return [int(block) for block in np.flatnonzero(wrong)]

    def differ(
        self, group: int, given: NDArray[np.uint8], computed: NDArray[np.uint8], valid: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        shape = (len(given), -1, self.block_tokens, self.spec.token_row_nbytes(group))
        unequal = (given.reshape(shape) != computed.reshape(shape)).any(axis=(1, 3))
        counts: NDArray[np.bool_] = np.arange(self.block_tokens) < valid[:, None]
        found: NDArray[np.bool_] = (unequal & counts).any(axis=1)
        return found

    def _place(
        self,
        group: int,
        layers: NDArray[np.void],
        table: NDArray[np.int32],
        states: NDArray[np.uint64],
        start: int,
        end: int,
    ) -> tuple[object, ...]:
        """Return the kernels' arguments that follow the memory."""
        spec = self.spec.groups[group]
        used = slice(start // self.block_tokens, -(-end // self.block_tokens))
        slots = np.zeros(len(table), np.int64)
        slots[used] = self.offsets(group, table[used]) // _WORD_NBYTES
        row_words = spec.token_row_nbytes // _WORD_NBYTES
        rows = np.array([(self.block_tokens, 2 * spec.kv_heads, row_words, start, end)], ROWS)
        return slots, layers, states, rows
