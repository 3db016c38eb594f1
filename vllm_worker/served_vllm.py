"""Which requests of a stock vLLM have a job, and which are left to vLLM alone. Lives in vLLM's scheduler.

A request that may reuse KV is announced to the KV agent (`agent`), and vLLM looks at it again in each step until the
agent has replied. Once the agent has ended, all requests are left to vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from engine import EngineError
from engine.local_folder import local_folder
from vllm_worker.agent_link import AgentFailed, AgentLink
from vllm_worker.agent_messages import SPARE_BLOCKS, DescribedModel
from vllm_worker.engine import computation, kv_spec, require_plain_kv, weights_fingerprint
from vllm_worker.kv_jobs import KvJob
from worker.errors import StartupError

log = logging.getLogger(__name__)

REPLY_S: Final = 30.0
"""Longest time for which a request waits for the agent's reply."""


class AgentMessages(Protocol):
    """Messages to and from the agent; AgentLink has them."""

    has_ended: bool

    def send(self, *message: Any) -> None:
        """Queue a message for the agent."""

    def take(self) -> list[list[Any]]:
        """Return the messages that have arrived since the last call."""

    def close(self) -> None:
        """End the agent."""


class VllmRequest(Protocol):
    """Request of vLLM's scheduler: the fields that count here."""

    request_id: str
    cache_salt: str | None
    num_prompt_tokens: int
    num_computed_tokens: int
    max_tokens: int

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Ids of the prompt and of the answer so far."""


@dataclass(slots=True)
class _Entry:
    """State of a request's job: awaited, known, or none."""

    deadline: float  # time.monotonic() instant until which it is awaited
    most_tokens: int  # that have KV, of prompt and answer
    is_awaited: bool = True
    job: KvJob | None = None
    is_growing: bool = False


class ServedVllm:
    """The jobs of a stock vLLM's requests. Lives in its scheduler."""

    def __init__(
        self,
        link: AgentMessages,
        block_tokens: int,
        *,
        loads: bool = True,
        saves: bool = True,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `loads` no KV is loaded from the pool, without `saves` none is stored in it."""
        self._link = link
        self._block_tokens = block_tokens
        self._loads = loads
        self._saves = saves
        self._now_s = now_s
        self._entries: dict[str, _Entry] = {}
        self._names: dict[int, str] = {}  # vLLM's request ids by job

    @classmethod
    def start(cls, vllm_config: Any) -> ServedVllm:
        """Start the agent of a vLLM. Raises StartupError if its KV has no place in the pool or the agent fails."""
        transfer = vllm_config.kv_transfer_config
        try:
            link = AgentLink.start(agent_settings(vllm_config), described_model(vllm_config), transfer.engine_id)
        except (AgentFailed, OSError) as error:
            raise StartupError(f"MoonpoolConnector: {error}") from error
        return cls(
            link,
            vllm_config.cache_config.block_size,
            loads=transfer.is_kv_consumer,
            saves=transfer.is_kv_producer,
        )

    def close(self) -> None:
        """End the agent."""
        self._link.close()

    def is_awaited(self, request: VllmRequest) -> bool:
        """Return True while the request's job is not known yet. The first call asks the agent for one."""
        self._take()
        entry = self._entries.get(request.request_id)
        if entry is None:
            entry = self._entries[request.request_id] = _Entry(
                self._now_s() + REPLY_S, request.num_prompt_tokens + request.max_tokens - 1
            )
            if _has_plain_prompt(request):
                ids = np.array(request.all_token_ids, "<i4").tobytes()
                self._link.send("begin", request.request_id, ids, request.cache_salt or "", max(1, request.max_tokens))
            else:
                entry.is_awaited = False
        if entry.is_awaited and self._link.has_ended:
            entry.is_awaited = False
        elif entry.is_awaited and self._now_s() > entry.deadline:
            log.warning("a request is computed without the pool: the KV agent does not reply within %g s", REPLY_S)
            self._link.send("cancel", request.request_id)
            entry.is_awaited = False
        return entry.is_awaited

    def job(self, request_id: str) -> KvJob | None:
        """Return the request's job; None if it has none."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.job

    def advanced(self, request_id: str, num_tokens: int) -> None:
        """Ask for more slots if a request with `num_tokens` tokens will soon need them."""
        self._take()
        entry = self._entries.get(request_id)
        if entry is None or entry.job is None or entry.is_growing or not self._saves:
            return
        room = len(entry.job.slots) * self._block_tokens
        wanted = min(entry.most_tokens, num_tokens + SPARE_BLOCKS * self._block_tokens)
        if wanted > room:
            missing = -(-(wanted - room) // self._block_tokens)
            entry.is_growing = True
            self._link.send("grow", entry.job.number, missing)

    def ended(self, request: VllmRequest) -> KvJob | None:
        """Forget a request that vLLM has ended. Returns its job, whose KV is still to be saved."""
        self._take()
        entry = self._entries.pop(request.request_id, None)
        if entry is None:
            return None
        if entry.job is None:
            if entry.is_awaited:
                self._link.send("cancel", request.request_id)
            return None
        del self._names[entry.job.number]
        ids = request.all_token_ids
        answer = np.array(ids[request.num_prompt_tokens :], "<i4").tobytes()
        # The last id is never an input; steps that are still under way write their KV before any copy.
        computed = min(request.num_computed_tokens, len(ids) - 1, len(entry.job.slots) * self._block_tokens)
        self._link.send("end", entry.job.number, answer, computed if self._saves else 0)
        return entry.job

    def _take(self) -> None:
        for kind, *fields in self._link.take():
            if kind == "job":
                self._begun(*fields)
            elif kind == "no job":
                if (entry := self._entries.get(fields[0])) is not None:
                    entry.is_awaited = False
            elif kind == "slots":
                self._grown(*fields)
            else:
                log.error("a message of the KV agent was not understood: %r", kind)

    def _begun(self, request_id: str, fields: Mapping[str, Any]) -> None:
        job = KvJob.from_fields(fields)
        entry = self._entries.get(request_id)
        if entry is None or not entry.is_awaited:
            return  # the agent has been told that vLLM no longer waits for it
        entry.is_awaited = False
        entry.job = job if self._loads else replace(job, load_tokens=0)
        self._names[job.number] = request_id

    def _grown(self, number: int, slots: Sequence[int]) -> None:
        entry = self._entries.get(self._names.get(number, ""))
        if entry is not None and entry.job is not None:
            entry.is_growing = not slots  # without slots there is no use in asking again
            entry.job = replace(entry.job, slots=(*entry.job.slots, *slots))


def _has_plain_prompt(request: Any) -> bool:
    """Return True if the KV of a request follows from its ids and its salt alone."""
    return not (
        request.lora_request
        or request.mm_features
        or request.pooling_params
        or request.prompt_embeds is not None
        or getattr(request, "resumable", False)  # not in every version
    )


def agent_settings(vllm_config: Any) -> dict[str, Any]:
    """Return the settings of the agent: those in vLLM's `kv_connector_extra_config`, and vLLM's block size."""
    given = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
    if "block_tokens" in given:
        raise StartupError("MoonpoolConnector: block_tokens is vLLM's --block-size; omit it")
    return {**given, "block_tokens": vllm_config.cache_config.block_size}


def described_model(vllm_config: Any) -> DescribedModel:
    """Return what the agent must know of the model. Raises StartupError for KV that has no place in the pool."""
    import vllm

    if vllm_config.speculative_config is not None:
        raise StartupError("MoonpoolConnector does not support speculative decoding: drafts have KV of their own")
    require_plain_kv(vllm_config)
    model = vllm_config.model_config
    name = model.model if model.revision is None else f"{model.model}@{model.revision}"
    try:
        folder = local_folder(Path(name), weights=True, any_family=True)
    except EngineError as error:
        raise StartupError(f"MoonpoolConnector: {error}") from error
    return DescribedModel(
        spec=kv_spec(vllm_config).to_proto().SerializeToString(deterministic=True),
        fingerprint=weights_fingerprint(folder),
        computation=computation(str(vllm.__version__), vllm_config),
        max_model_len=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        num_ranks=vllm_config.parallel_config.tensor_parallel_size,
    )
