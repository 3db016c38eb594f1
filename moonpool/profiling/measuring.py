"""Measurements of a loaded model's prefills and decode steps, and of transfers between two processes of this host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch
from rich.console import Console

from engine import ForwardBatch, Model, SamplingRow, SequenceChunk, sample
from moonpool.profiling.fitting import MeasuredPoint, WorkGrid, fit, fit_error
from moonpool.transfer_bench.plan import BenchPlan
from moonpool.transfer_bench.run import measure_here
from settings.messenger import TlsSettings
from worker.policy.cost_profile import Range, TransferCost

__all__ = ["measure_transfers"]

_SIZES = tuple(1 << power for power in (14, 16, 18, 20, 22, 24))
# Pools are read by shared memory within a host, and by TCP between hosts without RDMA.
_PATHS = {("shm", "read"): "load", ("tcp", "read"): "fetch", ("tcp", "write"): "push"}


def measure_transfers(seconds: float, console: Console) -> dict[str, TransferCost]:
    """Return costs by path ("load", "fetch", "push"), from single batches. Raises TransferBenchFailed."""
    plan = BenchPlan(
        sizes=_SIZES,
        slices=(1,),
        directions=("read", "write"),
        transports=("shm", "tcp"),
        window=1,
        seconds=seconds,
        digests=False,
        deadline_s=30.0,
    )
    outcome = measure_here(plan, TlsSettings(), console)
    found = {}
    for (transport, direction), path in _PATHS.items():
        cells = [r for r in outcome.results if (r.transport, r.direction) == (transport, direction)]
        if len(cells) < len(_SIZES):
            continue  # interrupted
        features = [(1.0, float(cell.batch_bytes)) for cell in cells]
        taken = [cell.p50_us / 1e6 for cell in cells]
        fixed, per_byte = coefficients = fit(features, taken)
        nbytes = Range(_SIZES[0], _SIZES[-1])
        found[path] = TransferCost(fixed, per_byte, nbytes, fit_error(features, taken, coefficients))
    return found


__all__ = ["EngineRun"]

_GREEDY = SamplingRow(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice=0, index=0)
_LONGEST_S = 3.0  # limit for all repeats of one point after the third


class EngineRun:
    """Runs prefills in chunks and decode steps, each with its sampling, as workers do.

    `on_done(runs so far)` is called after each run; `clock` returns seconds.
    """

    def __init__(
        self,
        model: Model,
        *,
        block_tokens: int,
        capacity_tokens: int,
        chunk_tokens: int,
        repeats: int,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self._repeats = repeats
        self._clock = clock
        self._slots = -(-capacity_tokens // block_tokens)
        self._cache = model.new_cache((self._slots,) * len(model.kv_groups), block_tokens)
        self._rng = np.random.default_rng(0)
        self._longest = min(model.config.max_positions, capacity_tokens)
        model.warm_up()
        self._prefill(self._longest - 1, 0)  # later runs attend to KV, which must hold numbers

    def prefills(self, grid: WorkGrid, on_done: Callable[[int], None]) -> list[MeasuredPoint]:
        """Return one point per (new, reused)."""
        return self._measure([(x, lambda x=x: self._prefill(*x)) for x in grid.prefills], on_done)  # type: ignore[misc]

    def steps(self, grid: WorkGrid, on_done: Callable[[int], None]) -> list[MeasuredPoint]:
        """Return one point per (batch, context); `x` holds the total context of all sequences."""
        found = self._measure([(x, lambda x=x: self._step(*x)) for x in grid.steps], on_done)  # type: ignore[misc]
        return [MeasuredPoint((p.x[0], p.x[0] * p.x[1]), p.median_s, p.least_s) for p in found]

    def _measure(
        self, work: Sequence[tuple[tuple[int, int], Callable[[], None]]], on_done: Callable[[int], None]
    ) -> list[MeasuredPoint]:
        """Measure all points in each round, rather than one after the other, so that disturbances affect all alike."""
        seconds: list[list[float]] = [[] for _ in work]
        done = 0
        for turn in range(self._repeats + 1):
            for (_, run), taken in zip(work, seconds, strict=True):
                if turn <= 3 or sum(taken) < _LONGEST_S:
                    began = self._clock()
                    run()
                    if turn:  # the first round warms caches
                        taken.append(self._clock() - began)
                done += 1
                on_done(done)
        return [MeasuredPoint(x, median(taken), min(taken)) for (x, _), taken in zip(work, seconds, strict=True)]

    @torch.inference_mode()
    def _prefill(self, new: int, reused: int) -> None:
        end = reused + new
        for start in range(reused, end, self._chunk_tokens):
            until = min(start + self._chunk_tokens, end)
            logits = self._model.forward(ForwardBatch([self._chunk(start, until, 0, until == end)]), self._cache)
        sample(logits, [_GREEDY])

    @torch.inference_mode()
    def _step(self, batch: int, context: int) -> None:
        blocks = -(-(context + 1) // self._block_tokens)
        chunks = [
            self._chunk(context, context + 1, (i * blocks) % (self._slots - blocks + 1), True) for i in range(batch)
        ]
        sample(self._model.forward(ForwardBatch(chunks), self._cache), [_GREEDY] * batch)

    def _chunk(self, start: int, end: int, first_slot: int, last: bool) -> SequenceChunk:
        tokens = self._rng.integers(0, self._model.config.vocab_size, end - start, dtype=np.int32)
        table = first_slot + np.arange(-(-end // self._block_tokens), dtype=np.int32)
        return SequenceChunk(tokens, start, (table,) * len(self._model.kv_groups), want_logits=last)
