"""An engine that sleeps for the predicted duration of its steps and writes KV that can be verified."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine import EngineError, KvGroupShape
from engine.config import ModelConfig, read_config
from kvpool import Provenance
from messenger import Messenger
from worker.engine_interface import OnLayer, SampledToken, SteppedEngine
from worker.errors import ProfileError, RequestFailed, RequestRefused, StartupError, sequence_error
from worker.paced.kernels import kernels
from worker.paced.memory import PacedMemory
from worker.paced.pace import Pace
from worker.paced.profiles import profile_of
from worker.paced.tokens import Draw, PacedTokens, states_after
from worker.policy import BatchLimits, PrefillChunk
from worker.policy.cost_profile import CostProfile
from worker.request import EngineSequence, Request
from worker.slot_memory import EngineMemory, SlotMemory, spec_of, windows_of

if TYPE_CHECKING:
    from worker.config import WorkerConfig

log = logging.getLogger(__name__)

_DTYPES = ("float32", "float16", "bfloat16")


class PacedEngine(SteppedEngine):
    """Paced engine of a model folder; needs neither the weights nor torch."""

    def __init__(
        self,
        config: ModelConfig,
        tokens: PacedTokens,
        profile: CostProfile,
        *,
        dtype: str,
        kv_bytes: int,
        identity: str,
    ) -> None:
        """`kv_bytes` is the approximate number of KV bytes per token; 0: that of the model. `identity` holds further
        inputs of the tokens, for the fingerprint.
        """
        self.config = config
        self.label = f"paced:{profile.name}"
        self._groups = config.kv_groups(dtype) if not kv_bytes else _small_groups(config, kv_bytes)
        self._profile = profile
        self._tokens = tokens
        self._steps: PacedSteps | None = None
        parts = [asdict(config), [asdict(group) for group in self._groups], identity]
        self.fingerprint = hashlib.blake2b(
            b"paced" + json.dumps(parts, sort_keys=True).encode(), digest_size=16
        ).hexdigest()

    @classmethod
    def of(cls, config: WorkerConfig) -> PacedEngine:
        """Create the configured engine. Raises StartupError."""
        try:
            model = read_config(config.model.path)
            profile = profile_of(config.engine.paced_profile)
        except (EngineError, ProfileError) as error:
            raise StartupError(str(error)) from error
        dtype = model.checkpoint_dtype if config.engine.dtype == "auto" else config.engine.dtype
        engine = paced_engine(
            config.model.path, model, profile, dtype=dtype, kv_bytes=config.engine.paced_kv_bytes,
            answer_tokens=config.engine.paced_answer_tokens,
        )  # fmt: skip
        log.warning(
            "the engine is paced: it waits for the durations of profile %s and returns meaningless tokens",
            profile.name,
        )
        return engine

    def new_memory(
        self, messenger: Messenger, *, num_slots: int, block_tokens: int, limits: BatchLimits | None = None
    ) -> PacedMemory:
        try:
            spec = spec_of(self._groups, block_tokens)
            windows = windows_of(spec, num_slots, limits)
        except ValueError as error:
            raise StartupError(str(error)) from error
        return PacedMemory(spec, num_slots, messenger, windows)

    def new_stored(self, memory: EngineMemory, messenger: Messenger) -> tuple[SlotMemory, Provenance]:
        return memory, Provenance.EXACT

    def steps(self, memory: EngineMemory) -> PacedSteps:
        assert isinstance(memory, PacedMemory)
        self._steps = PacedSteps(memory, self._profile, self._tokens, Pace())
        return self._steps

    def warm_up(self) -> None:
        kernels()

    def check(self, request: Request) -> None:
        if request.rolling is not None:
            raise RequestRefused(
                "unsupported", "paced engines have no windows of endless requests (endless.window, --endless-window)"
            )
        sampling = request.sampling
        if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
            raise RequestRefused(
                "unsupported", "logprobs are not supported by the paced engine, which has no probabilities"
            )

    def counters(self) -> Mapping[str, float]:
        return self._steps.counters() if self._steps is not None else {}


def paced_engine(
    folder: Path, model: ModelConfig, profile: CostProfile, *, dtype: str, kv_bytes: int, answer_tokens: int
) -> PacedEngine:
    """Return the engine of a folder whose configuration is `model`."""
    tokens = PacedTokens.of(folder, model, answer_tokens)
    dtype = dtype if dtype in _DTYPES else "float16"
    return PacedEngine(model, tokens, profile, dtype=dtype, kv_bytes=kv_bytes, identity=f"answers:{answer_tokens}")


def _small_groups(config: ModelConfig, kv_bytes: int) -> tuple[KvGroupShape, ...]:
    """Return the model's groups and layers with a single head, sized for about `kv_bytes` per token.

    Values are float16, at least 2 per head.
    """
    values = max(2, kv_bytes // (len(config.kv_layers) * 2 * 2) // 2 * 2)
    return tuple(replace(group, kv_heads=1, head_dim=values, dtype="float16") for group in config.kv_groups("float16"))


class _Course:
    """The engine's state of one sequence: states of its tokens, and the random draw of its answer."""

    def __init__(self, sequence: EngineSequence, tokens: PacedTokens) -> None:
        sampling, prompt = sequence.request.sampling, sequence.request.prompt
        self.draw = Draw(sampling.seed, sampling.temperature, sampling.choice)
        self._states = np.empty(len(sequence.tokens), np.uint64)
        self._known = 0
        self.is_checked = False  # the KV that the sequence arrived with was compared with its ids
        self.states(sequence, max(sequence.num_tokens, len(prompt)))
        own = len(prompt) - sequence.request.generated
        self.end = tokens.end(sampling.stop_ids)
        length = tokens.length(int(self._states[own - 1]), self.draw) if self.end is not None else 0
        self.last_index = max(length, sampling.min_tokens + 1) - 1 if length else -1

    def states(self, sequence: EngineSequence, count: int) -> NDArray[np.uint64]:
        """Return the states of all tokens, computed up to `count`."""
        if count > self._known:
            before = int(self._states[self._known - 1]) if self._known else 0
            self._states[self._known : count] = states_after(sequence.tokens[self._known : count], before)
            self._known = count
        return self._states


class PacedSteps:
    """Runner of paced steps. Called on the engine thread."""

    def __init__(self, memory: PacedMemory, profile: CostProfile, tokens: PacedTokens, pace: Pace) -> None:
        self._memory = memory
        self._profile = profile
        self._tokens = tokens
        self._pace = pace
        self._layers = tuple(memory.place_of_layer)
        self._checked_tokens = self._wrong_blocks = 0

    def counters(self) -> dict[str, float]:
        return {
            "paced_steps": self._pace.steps,
            "paced_planned_seconds": self._pace.planned_s,
            "paced_late_seconds": self._pace.late_s,
            "paced_checked_tokens": self._checked_tokens,
            "paced_wrong_blocks": self._wrong_blocks,
        }

    def run(
        self,
        decoding: Sequence[EngineSequence],
        chunks: Sequence[tuple[EngineSequence, PrefillChunk]],
        on_layer: OnLayer | None,
        before_layer: OnLayer | None = None,
    ) -> list[SampledToken | None]:
        self._pace.begin()
        seconds = self.cost_s(decoding, chunks)
        for sequence in (*decoding, *(s for s, _ in chunks)):
            self._take_up(sequence)
        for sequence in decoding:
            self._write(sequence, sequence.num_computed, sequence.num_tokens, None)
        if chunks:
            self._fill_layers(chunks, seconds, on_layer, before_layer)
        rows = [*decoding, *(s for s, c in chunks if c.last)]
        chosen = [self._choose(sequence) for sequence in rows]
        self._pace.end(seconds)
        return chosen

    def settle(self) -> None:
        """Nothing is queued ahead."""

    def cost_s(
        self, decoding: Sequence[EngineSequence], chunks: Sequence[tuple[EngineSequence, PrefillChunk]]
    ) -> float:
        """Return the predicted seconds of a step: its decode step, and each chunk's part of its prompt."""
        seconds = 0.0
        if decoding:
            seconds += self._profile.decode_s(len(decoding), sum(s.num_computed for s in decoding))
        for sequence, chunk in chunks:
            reused = sequence.reused_tokens
            seconds += self._profile.prefill_s(chunk.end - reused, reused)
            if chunk.start > reused:
                seconds -= self._profile.prefill_s(chunk.start - reused, reused)
        return seconds

    def _fill_layers(
        self,
        chunks: Sequence[tuple[EngineSequence, PrefillChunk]],
        seconds: float,
        on_layer: OnLayer | None,
        before_layer: OnLayer | None,
    ) -> None:
        """Write the layers one after another at their times, so that pushes are sent at the times of a real model.

        A layer begins when its reused KV is there, and then takes its own time.
        """
        for done, layer in enumerate(self._layers, 1):
            if before_layer is not None:
                self._pace.run_out(partial(before_layer, layer))
            for sequence, chunk in chunks:
                self._write(sequence, chunk.start, chunk.end, layer)
            if on_layer is not None or before_layer is not None:
                self._pace.wait(seconds * done / len(self._layers))
            if on_layer is not None:
                on_layer(layer)
        for sequence, chunk in chunks:
            course = _course(sequence)
            if not course.is_checked:  # its KV was still arriving when the step began
                course.is_checked = True
                self._verify(sequence, course, chunk.start)

    def _take_up(self, sequence: EngineSequence) -> None:
        """Initialise a new sequence and verify that the KV it arrives with matches its ids."""
        if sequence.engine_state is None:
            course = sequence.engine_state = _Course(sequence, self._tokens)
            if sequence.gate is None:
                course.is_checked = True
                self._verify(sequence, course, sequence.num_computed)

    def _verify(self, sequence: EngineSequence, course: _Course, end: int) -> bool:
        """Return True if tokens [0, end) have the KV of their ids; otherwise set the sequence's error."""
        if not end:
            return True
        wrong = self._memory.wrong_blocks(sequence, course.states(sequence, end), end)
        self._checked_tokens += end
        if wrong:
            self._wrong_blocks += len(wrong)
            sequence.error = RequestFailed(
                "kv", f"blocks {wrong[:8]} of {len(sequence.table)} hold KV that does not match the request's ids"
            )
            log.error("%s", sequence.error, extra=sequence.request.log_fields)
        return not wrong

    def _write(self, sequence: EngineSequence, start: int, end: int, layer: int | None) -> None:
        self._memory.write(sequence, _course(sequence).states(sequence, end), start, end, layer)

    def _choose(self, sequence: EngineSequence) -> SampledToken | None:
        if sequence.error is not None:
            return None
        course = _course(sequence)
        index, choices = sequence.next_index, None
        if sequence.steering is not None:
            try:
                choices = self._tokens.choices(sequence.steering.row(index))
            except Exception as error:
                sequence.error = sequence_error(error)
                return None
        if index == course.last_index and choices is None:
            assert course.end is not None
            token = course.end
        else:
            state = int(course.states(sequence, sequence.num_tokens)[sequence.num_tokens - 1])
            token = self._tokens.token(state, course.draw, index, choices)
        # The answer's slots are released at its end: check that nothing else was written to them meanwhile.
        ends = sequence.remaining == 1 or token == course.end
        return None if ends and not self._verify(sequence, course, sequence.num_computed) else SampledToken(token)


def _course(sequence: EngineSequence) -> _Course:
    assert isinstance(sequence.engine_state, _Course)
    return sequence.engine_state
