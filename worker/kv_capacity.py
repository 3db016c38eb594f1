"""Capacity of the transformer's KV cache, chosen from the memory that the weights leave (`capacity_tokens` auto).

The slots are in the device's memory; beside a GPU also in their mirror in host memory, and, where KV is stored in int8
or siblings' KV is reused, in further forms in host memory. The capacity is the largest for which each memory has room,
at most that with which every sequence of a full batch may be as long as the model allows.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from engine import Model
from engine.step_memory import gathered_block_nbytes, step_nbytes
from kvpool import KvSpec
from kvpool.memory_readings import MemoryReader
from worker.config import WorkerConfig
from worker.engine_interface import Engine
from worker.errors import StartupError
from worker.hidden_memory import hidden_spec
from worker.kv_memory import quantised_spec
from worker.policy import BatchLimits, num_window_slots
from worker.sibling_reuse import profiles_of
from worker.slot_memory import spec_of
from worker.transformer import Transformer

log = logging.getLogger(__name__)

GPU_FRACTION: Final = 0.9  # the rest is left to fragmentation and to batches of many long sequences
HOST_FRACTION: Final = 0.5  # the host also has the pool, whose memory is taken while it fills, and other processes
_STEPS: Final = 32
"""Capacities are rounded down to this many steps per doubling: workers of equal hosts then mostly have the same one,
by which the conductor recognises nodes of equal speed."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory for slots, and the forms of the slots that lie in it."""

    place: str  # for messages
    free_nbytes: int
    fraction: float  # of the free memory that may be used
    specs: tuple[KvSpec, ...]
    step_nbytes: int = 0  # what a step needs of it
    step_block_nbytes: int = 0  # what a step needs for each block that its sequences hold

    @property
    def usable_nbytes(self) -> int:
        """Bytes that slots may take."""
        return max(0, int(self.free_nbytes * self.fraction) - self.step_nbytes)

    def needed_nbytes(self, num_blocks: int, limits: BatchLimits) -> int:
        """Return the bytes of the slots of `num_blocks` blocks. Raises ValueError as `num_window_slots`."""
        slots = sum(slots_nbytes(spec, num_blocks, limits) for spec in self.specs)
        return slots + num_blocks * self.step_block_nbytes

    def num_blocks(self, most: int, limits: BatchLimits) -> int:
        """Return the largest number of blocks, at most `most`, for which there is room."""
        return bisect_right(range(1, most + 1), self.usable_nbytes, key=lambda n: self.needed_nbytes(n, limits))


def slots_nbytes(spec: KvSpec, num_blocks: int, limits: BatchLimits) -> int:
    """Return the bytes of the slots of `num_blocks` blocks; groups with windows have as many as steps within `limits`
    need. Raises ValueError as `num_window_slots`.
    """
    windowed = num_window_slots(limits, spec.window_blocks, num_blocks) if spec.windowed else 0
    return sum(spec.slot_nbytes(g) * (windowed if g in spec.windowed else num_blocks) for g in range(spec.num_groups))


def with_capacity(config: WorkerConfig, engine: Engine, limits: BatchLimits) -> WorkerConfig:
    """Return the configuration with the capacity that suits the loaded engine. Raises StartupError."""
    assert isinstance(engine, Transformer)  # the configuration was checked
    own = engine.model.config.max_positions
    max_model_len = min(own, config.engine.max_model_len or own)
    try:
        budgets = _budgets(config, engine, max_model_len)
        num_blocks = fitting_blocks(budgets, max_model_len, limits)
        needed = [budget.needed_nbytes(num_blocks, limits) for budget in budgets]
    except ValueError as error:
        raise StartupError(str(error)) from error
    capacity_tokens = num_blocks * limits.block_tokens
    log.info(
        "capacity_tokens auto: %d (%s)",
        capacity_tokens,
        "; ".join(
            f"{_size(nbytes)} of {_size(budget.free_nbytes)} free {budget.place}, {_size(budget.step_nbytes)} for steps"
            for budget, nbytes in zip(budgets, needed, strict=True)
        ),
    )
    return replace(config, engine=replace(config.engine, capacity_tokens=capacity_tokens))


def fitting_blocks(budgets: Sequence[MemoryBudget], max_model_len: int, limits: BatchLimits) -> int:
    """Return the number of blocks for which every memory has room.

    It is at most that of `max_batch` sequences of `max_model_len`. Raises StartupError if there is no room for one such
    sequence, and ValueError as `num_window_slots`.
    """
    least = -(-max_model_len // limits.block_tokens)
    most = least * limits.max_batch
    for budget in budgets:
        needed = budget.needed_nbytes(least, limits)
        if needed > budget.usable_nbytes:
            raise StartupError(
                f"capacity_tokens auto: one sequence of {max_model_len} tokens needs {_size(needed)} {budget.place}, "
                f"where {_size(budget.free_nbytes)} are free and {_size(budget.usable_nbytes)} may be used "
                f"({budget.fraction:.2g} of them, less {_size(budget.step_nbytes)} for steps): lower --max-model-len "
                "or --prefill-chunk-tokens, raise --memory-fraction, free memory, or set --capacity-tokens to a number"
            )
    found = min(budget.num_blocks(most, limits) for budget in budgets)
    if found == most:
        return most
    step = 1 << max(0, found.bit_length() - _STEPS.bit_length())
    return max(least, found // step * step)


def _budgets(config: WorkerConfig, engine: Transformer, max_model_len: int) -> list[MemoryBudget]:
    """Return the memories in which the worker's slots lie, the device's first. Raises StartupError, ValueError."""
    model, block_tokens = engine.model, config.block_tokens
    spec = spec_of(model.kv_groups, block_tokens)
    host_specs = list(_host_forms(config, engine, spec))
    steps_nbytes = _largest_step(config, model, max_model_len)
    gathered = gathered_block_nbytes(model, block_tokens)
    host_fraction = HOST_FRACTION / config.num_host_workers
    if model.device.type == "cpu":
        fraction = config.engine.memory_fraction or host_fraction
        specs = (spec, *host_specs)
        return [MemoryBudget("in host memory", host_free_nbytes(), fraction, specs, steps_nbytes, gathered)]
    if config.kv.kv_staging != "direct":
        host_specs.append(spec)  # the mirror, also with `auto`, which may come to it
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(model.device)
    fraction = config.engine.memory_fraction or GPU_FRACTION / config.num_device_workers
    budgets = [MemoryBudget(f"on {model.device}", free, fraction, (spec,), steps_nbytes, gathered)]
    if host_specs:
        budgets.append(MemoryBudget("in host memory", host_free_nbytes(), host_fraction, tuple(host_specs)))
    return budgets


def _host_forms(config: WorkerConfig, engine: Transformer, spec: KvSpec) -> list[KvSpec]:
    """Return the forms of the slots in host memory beside those in which the engine computes."""
    model, found = engine.model, list[KvSpec]()
    if config.kv.kv_storage == "int8" and not model.config.kv_scale_group:
        found.append(quantised_spec(spec))
    profiles = profiles_of(config.kv.reuse_profile, engine, config.model.name)
    if layers := sorted({layer for profile in profiles for layer in profile.input_layers}):
        found.append(hidden_spec(layers, model.config.hidden_size, model.dtype, spec.block_tokens))
    return found


def _largest_step(config: WorkerConfig, model: Model, max_model_len: int) -> int:
    settings = config.engine
    try:
        return step_nbytes(
            model,
            num_tokens=settings.prefill_chunk_tokens,
            num_decoding=settings.max_batch,
            context=max_model_len,
            block_tokens=config.block_tokens,
        )
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"capacity_tokens auto: {model.device} has no memory for a step of {settings.prefill_chunk_tokens} tokens "
            f"at the end of {max_model_len}: lower --max-model-len, --prefill-chunk-tokens or --max-batch, or set "
            "--capacity-tokens to a number"
        ) from error


def host_free_nbytes() -> int:
    """Return the bytes that this process can still take, within its control groups' limits. Raises StartupError."""
    scopes = MemoryReader().read()
    if not scopes:
        raise StartupError(
            "capacity_tokens auto: /proc/meminfo does not say how much memory is available: set --capacity-tokens"
        )
    return min(scope.available_nbytes for scope in scopes)


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB"
