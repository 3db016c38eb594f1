"""Which blocks of vLLM are copied from and to a worker's slots, step by step. No I/O; imports neither vLLM nor torch.

A sequence's KV is in its slots before vLLM computes it, as far as it is reused, and must be there afterwards. Slot i of
a sequence holds block i of its tokens; vLLM keeps the same block in a block of its own. `JobTable` lives in vLLM's
scheduler and learns there which blocks a request has; `StepCopies` goes with each step to the processes that hold the
blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

KV_PARAMS: Final = "moonpool_kv"
"""Key of a job in vLLM's `kv_transfer_params`."""

Pairs = list[tuple[int, int]]  # (vLLM's block, slot)


@dataclass(frozen=True, slots=True)
class KvJob:
    """The copies of one sequence."""

    number: int  # unique in one worker
    slots: tuple[int, ...]
    load_tokens: int  # leading tokens that are loaded from the slots
    save_from: int  # tokens from this one on are saved to the slots; slots of full blocks before it are not written
    saves_layers: bool  # layer by layer as the prompt is computed; otherwise when vLLM has ended the request

    def to_fields(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return {name: getattr(self, name) for name in self.__slots__} | {"slots": list(self.slots)}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> KvJob:
        """Return the job with these fields."""
        return cls(**{**fields, "slots": tuple(fields["slots"])})

    def to_params(self) -> dict[str, Any]:
        """Return the `kv_transfer_params` of a request."""
        return {KV_PARAMS: self.to_fields()}

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> KvJob | None:
        """Return the job in a request's `kv_transfer_params`; None for a request that has none."""
        given = (params or {}).get(KV_PARAMS)
        return None if given is None else cls.from_fields(given)


@dataclass(slots=True)
class BlocksToCopy:
    """Whole blocks of one request to copy."""

    job: int
    request_id: str  # vLLM's
    pairs: Pairs
    keeps_blocks: bool = False  # vLLM frees the request's blocks only when it has been reported as sent


@dataclass(slots=True)
class LayerToCopy:
    """Blocks that a step completes, to be copied to their slots as soon as a layer of them is computed."""

    job: int
    start: int  # prompt tokens [start, end) are computed
    end: int
    pairs: Pairs


@dataclass(slots=True)
class StepCopies:
    """The copies that accompany one step."""

    loads: list[BlocksToCopy] = field(default_factory=list)
    layers: list[LayerToCopy] = field(default_factory=list)
    ends: list[BlocksToCopy] = field(
        default_factory=list
    )  # requests that vLLM has ended, with what is left to be saved
    frees_blocks: bool = False  # blocks of preempted requests may be overwritten by this step


class JobTable:
    """The jobs of vLLM's requests, by vLLM's request ids."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._covered: dict[str, int] = {}  # tokens of layer-wise saved prompts that are in the slots
        self._loading: set[str] = set()
        self._next = StepCopies()

    def matched_tokens(self, job: KvJob, num_computed: int) -> int:
        """Return how many tokens after the first `num_computed` are to be loaded from the slots."""
        return max(0, job.load_tokens - num_computed)

    def allocated(
        self, request_id: str, job: KvJob, blocks: Sequence[int], num_loaded: int, *, in_step: bool = False
    ) -> None:
        """Load the last `num_loaded` of the job's tokens into the request's `blocks`.

        With `in_step` the load ends before the step that follows it is computed; otherwise `loaded` tells its end.
        """
        first = (job.load_tokens - num_loaded) // self._block_tokens
        end = -(-job.load_tokens // self._block_tokens)
        if not in_step:
            self._loading.add(request_id)
        self._next.loads.append(BlocksToCopy(job.number, request_id, self._pairs(job, blocks, first, end)))

    def loaded(self, request_ids: Iterable[str]) -> None:
        """Record that the loads of these requests have ended."""
        self._loading.difference_update(request_ids)

    def scheduled(self, request_id: str, job: KvJob, blocks: Sequence[int], *, end: int, prompt_tokens: int) -> None:
        """Save the blocks of a prompt whose tokens before `end` are there after the next step."""
        if not job.saves_layers:
            return
        start, end = self._covered.get(request_id, job.save_from), min(end, prompt_tokens)
        if end <= start:
            return
        last = end // self._block_tokens if end < prompt_tokens else -(-end // self._block_tokens)
        pairs = self._pairs(job, blocks, start // self._block_tokens, last)
        if pairs:
            self._covered[request_id] = end
            self._next.layers.append(LayerToCopy(job.number, start, end, pairs))

    def ended(self, request_id: str, job: KvJob, blocks: Sequence[int]) -> bool:
        """Save what is left of a request that vLLM has ended, if its KV was not saved layer by layer.

        Returns False for a request that was aborted during its load: vLLM keeps its blocks until the load has ended.
        """
        self._covered.pop(request_id, None)
        is_loading = request_id in self._loading
        self._loading.discard(request_id)
        first = job.save_from // self._block_tokens
        pairs = [] if is_loading or job.saves_layers else self._pairs(job, blocks, first, len(blocks))
        self._next.ends.append(BlocksToCopy(job.number, request_id, pairs, keeps_blocks=not is_loading))
        return not is_loading

    def take(self) -> StepCopies:
        """Return the copies of the next step, once."""
        taken, self._next = self._next, StepCopies()
        return taken

    @staticmethod
    def _pairs(job: KvJob, blocks: Sequence[int], first: int, end: int) -> Pairs:
        end = min(end, len(blocks), len(job.slots))
        return [(blocks[i], job.slots[i]) for i in range(first, end)]
