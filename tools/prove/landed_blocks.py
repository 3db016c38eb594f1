"""Invariant of blocks that a decode node counts as arrived: they hold the KV of their tokens, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from decode_node.reservation import Reservation
from tools.prove.hash_engine import HashMemory, HashSteps
from tools.prove.hash_model import HashModel, ReferenceSequence
from tools.prove.instances import on_creation, remember, running_process
from tools.prove.world.scheduler import world


def watch() -> None:
    """Wrap what records arrived blocks. Once per process."""
    on_creation(HashSteps, lambda steps: remember("hash steps", steps))
    landed = Reservation.landed

    def watched(self: Reservation, layers: list[int], blocks: NDArray[np.int64], right: NDArray[np.bool_]) -> None:
        landed(self, layers, blocks, right)
        [steps] = running_process().objects["hash steps"]
        model, memory = steps._model, steps._memory
        if self.request.rolling is None and not self.fenced and self.gone is None:
            _check(model, memory, self, layers, blocks, np.broadcast_to(right, (len(layers), len(blocks))))

    Reservation.landed = watched  # type: ignore[method-assign]


def _check(
    model: HashModel, memory: HashMemory, reservation: Any, layers: list[int], blocks: NDArray[np.int64], right: Any
) -> None:
    known = vars(reservation).setdefault("simulated_reference", None)
    if known is None:
        known = reservation.simulated_reference = ReferenceSequence(model, reservation.request.prompt.tolist())
    table, size = np.asarray(reservation.slots, np.int32), memory.block_tokens
    for i, layer in enumerate(layers):
        arrived = blocks[right[i]]
        if model.windows[layer]:  # of earlier blocks, nothing is seen
            group, _ = memory.place_of_layer[layer]
            has_slot = memory.numbers(group, table[arrived]) >= 0
            arrived = arrived[has_slot & (arrived >= reservation.seen_from)]
        for block in arrived.tolist():
            start, end = block * size, min((block + 1) * size, len(reservation.request.prompt))
            found = model.read(start, memory.read(layer, table, start, end))
            if not np.array_equal(found, known.hashes(layer)[start:end]):
                world().problem(f"wrong KV: {running_process().name} counts a block as arrived that holds other KV")
