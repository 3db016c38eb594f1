"""Moonpool's KV connector: vLLM's side of the copies between its blocks and the slots of a process beside it.

vLLM makes one in its scheduler, which learns the blocks of every request (`JobTable`), and one in the process of every
rank, which copies them (`BlockCopies`). Requests without a job, and those of others, are left alone.

The slots belong to the worker around vLLM, whose requests bring their jobs along; under a stock `vllm serve` they
belong to a KV agent that the scheduler starts and asks for jobs (`agent_link`).

Blocks stay allocated until their copies have ended: vLLM frees the blocks of a request only after every rank has
reported it as sent, and a load's only after it was reported as received.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm import _custom_ops as ops
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.models.utils import extract_layer_index

from vllm_worker.agent_link import copies_socket
from vllm_worker.block_copies import new_block_copies
from vllm_worker.block_layout import SlotLayout, in_slot_order, require_layers, require_plain_blocks
from vllm_worker.copy_channel import CopyReporter, Spans
from vllm_worker.engine_args import COPIES_SOCKET
from vllm_worker.kv_jobs import BlocksToCopy, JobTable, KvJob, LayerToCopy, StepCopies
from vllm_worker.step_work import STEPS, StepClock, StepWork

if TYPE_CHECKING:
    from vllm_worker.served_vllm import ServedVllm


@dataclass
class CopyMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vllm is not installed where types are checked
    """The copies that the ranks do in one step."""

    copies: StepCopies


@dataclass
class StepStats(KVConnectorStats):  # type: ignore[misc]
    """Steps of vLLM on their way to the worker, each as `StepWork.to_fields`."""

    @classmethod
    def of(cls, work: StepWork) -> StepStats:
        """Return the statistics that consist of one step."""
        return cls({STEPS: [work.to_fields()]})

    def is_empty(self) -> bool:
        return not self.data[STEPS]

    def aggregate(self, other: StepStats) -> StepStats:
        return StepStats({STEPS: [*self.data[STEPS], *other.data[STEPS]]})

    def reduce(self) -> dict[str, int | float]:
        steps = self.data[STEPS]
        return {"Steps": len(steps), "Avg step time (ms)": round(1e3 * sum(step[0] for step in steps) / len(steps), 3)}


@dataclass(slots=True)
class _Prompt:
    """A prompt in vLLM's scheduler, with the blocks that its steps have named: all versions of vLLM name them there."""

    job: KvJob
    num_tokens: int
    blocks: list[int] = field(default_factory=list)  # if it is saved layer by layer


class MoonpoolConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Connector of one vLLM process."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_tokens = vllm_config.cache_config.block_size
        self._jobs = JobTable(self._block_tokens)
        # On a CPU a copy takes less than the two steps of vLLM that it takes to hear of its end.
        self._loads_in_step = vllm_config.device_config.device_type == "cpu"
        self._prompts: dict[str, _Prompt] = {}  # of the worker's requests, by vLLM's request id
        self._steps = StepClock()
        self._transfer = vllm_config.kv_transfer_config
        self._socket_path: str | None = self._transfer.kv_connector_extra_config.get(COPIES_SOCKET)
        self._served: ServedVllm | None = None
        if self._socket_path is None and role == KVConnectorRole.SCHEDULER:
            from vllm_worker.served_vllm import ServedVllm  # with much that a worker's vLLM does not need

            self._served = ServedVllm.start(vllm_config)
        self._rank: _Rank | None = None

    # The scheduler's process.

    @property
    def requires_kv_delivery(self) -> bool:
        """False: after a preemption, what was saved before is still right, and the rest is saved again."""
        return False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._served is not None and self._served.is_awaited(request):
            return None, False
        job = self._job(request)
        if job is None:
            return 0, False
        if self._served is None:
            self._prompts[request.request_id] = _Prompt(job, request.num_prompt_tokens)
        count = self._jobs.matched_tokens(job, num_computed_tokens)
        return count, count > 0 and not self._loads_in_step

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        job = self._job(request)
        if job is not None and num_external_tokens > 0:
            ids = blocks.get_block_ids()[0]
            self._jobs.allocated(request.request_id, job, ids, num_external_tokens, in_step=self._loads_in_step)

    def build_connector_meta(self, scheduler_output: Any) -> CopyMetadata:
        work = self._steps.begin(time.monotonic())
        for new in scheduler_output.scheduled_new_reqs:
            self._scheduled(scheduler_output, work, new.req_id, new.num_computed_tokens, new.block_ids, has_all=True)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, num_computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            has_all = request_id in cached.resumed_req_ids
            self._scheduled(scheduler_output, work, request_id, num_computed, blocks, has_all=has_all)
        copies = self._jobs.take()
        copies.frees_blocks = bool(scheduler_output.preempted_req_ids)
        return CopyMetadata(copies)

    def _scheduled(
        self,
        step: Any,
        work: StepWork,
        request_id: str,
        num_computed: int,
        blocks: tuple[list[int], ...] | None,
        *,
        has_all: bool,
    ) -> None:
        """Record what a step computes of a request; `blocks` are the request's new ones, or all of them."""
        count = step.num_scheduled_tokens[request_id]
        end = num_computed + count
        if self._served is not None:
            self._served.advanced(request_id, end)
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return
        if num_computed < prompt.num_tokens:
            work.prompts.append((prompt.job.number, count))
        else:
            work.batch += 1
            work.context_tokens += num_computed
        if not prompt.job.saves_layers:
            return
        if has_all:
            prompt.blocks.clear()
        if blocks is not None:
            prompt.blocks += blocks[0]
        if end > len(prompt.blocks) * self._block_tokens:
            raise RuntimeError(f"vLLM computes {end} tokens of {request_id} in {len(prompt.blocks)} known blocks")
        self._jobs.scheduled(request_id, prompt.job, prompt.blocks, end=end, prompt_tokens=prompt.num_tokens)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        job = KvJob.of(request.kv_transfer_params) if self._served is None else self._served.ended(request)
        if job is None:
            return False, None
        self._prompts.pop(request.request_id, None)
        return self._jobs.ended(request.request_id, job, block_ids), None

    def _job(self, request: Any) -> KvJob | None:
        return KvJob.of(request.kv_transfer_params) if self._served is None else self._served.job(request.request_id)

    def update_connector_output(self, connector_output: Any) -> None:
        self._jobs.loaded(connector_output.finished_recving or ())

    def get_kv_connector_stats(self) -> StepStats | None:
        """Return the step that has ended: vLLM's scheduler asks once after each, its ranks have none."""
        work = self._steps.end(time.monotonic())
        return StepStats.of(work) if work is not None and (work.prompts or work.batch) else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StepStats:
        return StepStats(data or {STEPS: []})

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True: `save_kv_layer` must run between the layers."""
        return True

    # The ranks' processes.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        require_plain_blocks(self._kv_cache_config.kv_cache_groups)
        names = sorted(kv_caches, key=extract_layer_index)
        self._layers = {name: index for index, name in enumerate(names)}
        self._caches = [kv_caches[name] for name in names]
        self._positions = None
        if self._caches[0].device.type == "cpu":
            layer = self._vllm_config.compilation_config.static_forward_context[names[0]]
            self._positions = cpu_positions(self._caches[0], layer)
        if self._socket_path is not None:
            _ = self._own  # the worker listens already
        else:
            self._require_layout()  # the agent is started after this

    def _require_layout(self) -> None:
        """Raise LayoutMismatch if the KV cannot be copied to slots."""
        from vllm_worker.engine import kv_spec

        layout = SlotLayout.of(kv_spec(self._vllm_config), 0)
        require_layers(layout, 0, self._caches)
        heads = own_heads(layout.kv_heads)
        for cache in self._caches if self._positions is None else ():
            in_slot_order(cache, layout, len(heads))

    def handle_preemptions(self, kv_connector_metadata: CopyMetadata) -> None:
        if kv_connector_metadata.copies.frees_blocks:
            self._own.copies.order_compute()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for copy in self._step.loads:
            self._own.load(copy, is_awaited=not self._loads_in_step)
        if self._loads_in_step and self._step.loads:
            self._own.copies.order_compute()

    def wait_for_layer_load(self, layer_name: str) -> None:
        return  # sequences are computed after their loads

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self._step.layers:
            self._own.save_layer(self._layers[layer_name], self._step.layers)

    def wait_for_save(self) -> None:
        return  # the engine's thread waits for no copy; vLLM 0.29 does not call this in steps that compute nothing

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        for copy in self._step.ends:  # vLLM calls this once in every step, after what it computes
            self._own.end(copy)
        return (None, None) if self._rank is None else self._rank.take_ended()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._rank is None else self._rank.take_failed_blocks()

    def shutdown(self) -> None:
        if self._rank is not None:
            self._rank.close()
        if self._served is not None:
            self._served.close()

    @property
    def _own(self) -> _Rank:
        if self._rank is None:
            path = self._socket_path or str(copies_socket(self._transfer.engine_id))
            self._rank = _Rank(path, self._caches, self._positions)
        return self._rank

    @property
    def _step(self) -> StepCopies:
        metadata: CopyMetadata = self._get_connector_metadata()
        return metadata.copies


class _Rank:
    """The copies of one rank, and what vLLM and the worker are to hear of them.

    Its callbacks run on one thread for loads and one for saves, or one for both; single operations on the sets and
    lists are atomic under the GIL.
    """

    def __init__(self, socket_path: str, layers: Sequence[torch.Tensor], positions: torch.Tensor | None) -> None:
        rank, num_ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self._reporter = CopyReporter(socket_path, rank, num_ranks)
        layout = self._reporter.layout
        heads = own_heads(layout.kv_heads)
        self.copies = new_block_copies(self._reporter.slots, layout, layers, heads, positions)
        self._sent: list[str] = []
        self._received: list[str] = []
        self._failed_blocks: list[int] = []
        self._errors: dict[int, str] = {}  # why the KV of a running job is not in its slots

    def close(self) -> None:
        self.copies.close()
        self._reporter.close()

    def load(self, copy: BlocksToCopy, *, is_awaited: bool) -> None:
        """Load blocks of a request, whose end vLLM awaits or not; it computes them itself if that fails."""
        self.copies.load(copy, lambda copy, error: self._loaded(copy, error, is_awaited))

    def _loaded(self, copy: BlocksToCopy, error: Exception | None, is_awaited: bool) -> None:
        if error is not None:
            self._failed_blocks += [block for block, _ in copy.pairs]
            self._errors[copy.job] = f"blocks were not loaded: {error}"  # steps may have begun with them
        if is_awaited:
            self._received.append(copy.request_id)

    def save_layer(self, layer: int, copies: Sequence[LayerToCopy]) -> None:
        """Save a layer that has just been computed."""
        spans = [(copy.job, copy.start, copy.end) for copy in copies]
        self.copies.save_layer(layer, copies, lambda layer, error: self._layer_saved(layer, spans, error))

    def _layer_saved(self, layer: int, spans: Spans, error: Exception | None) -> None:
        if error is None:
            self._reporter.layer_saved(layer, spans)
        else:
            self._errors |= {job: str(error) for job, _, _ in spans}

    def end(self, copy: BlocksToCopy) -> None:
        """Save what is left of an ended request, and report its end."""
        self.copies.save(copy, self._ended)

    def _ended(self, copy: BlocksToCopy, error: Exception | None) -> None:
        if copy.keeps_blocks:
            self._sent.append(copy.request_id)
        earlier = self._errors.pop(copy.job, "")
        self._reporter.ended(copy.job, str(error) if error is not None else earlier)

    def take_ended(self) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose saves, and those whose loads, have ended since the last call."""
        sent, self._sent = self._sent, []
        received, self._received = self._received, []
        return set(sent) or None, set(received) or None

    def take_failed_blocks(self) -> set[int]:
        """Return blocks of vLLM that could not be loaded since the last call."""
        failed, self._failed_blocks = self._failed_blocks, []
        return set(failed)


def own_heads(kv_heads: int) -> range:
    """Return the KV heads that this rank holds; with fewer heads than ranks, several hold the same head."""
    rank, num_ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    first = rank * kv_heads // num_ranks
    return range(first, first + max(1, kv_heads // num_ranks))


_DIGITS = 16  # integers up to it are exact in every dtype of KV


def cpu_positions(kv: torch.Tensor, layer: Any) -> torch.Tensor:
    """Return where vLLM's CPU kernels keep each value of a head of a block: int64 [2 * tokens * head_dim].

    The order depends on the processor, and vLLM does not tell it. So its own kernel writes blocks whose values are the
    digits of their indices, and the positions are read off. `kv` is a layer's tensor, `layer` vLLM's attention layer.
    """
    _, _, tokens, twice = kv.shape
    size = tokens * twice // 2
    found = torch.zeros(2 * size, dtype=torch.long)
    weight = 1
    while weight < 2 * size:
        digits = torch.arange(2 * size) // weight % _DIGITS
        keys, values = digits.to(kv.dtype).view(2, tokens, 1, twice // 2)
        block = torch.zeros((1, 1, 2 * tokens, twice // 2), dtype=kv.dtype)
        ops.cpu_attn_reshape_and_cache(keys, values, *block.chunk(2, dim=2), torch.arange(tokens), layer.isa)
        found += weight * block.flatten().float().round().long()
        weight *= _DIGITS
    positions = torch.zeros_like(found)
    positions[found.clamp(0, 2 * size - 1)] = torch.arange(2 * size)
    return positions
