"""KV agent of a stock vLLM: slots, messenger and pool of a worker, without its engine, its frontend and its conductor.

`MoonpoolConnector` starts one beside the scheduler of each vLLM that it serves. A request's reused KV is loaded from
the pool into slots and verified before vLLM hears of it; vLLM's processes copy it into their blocks, and when vLLM has
ended the request they copy the rest into slots, from where it is stored. So a request is that of an aggregated worker,
whose engine is elsewhere.

A request never waits for slots: without them, vLLM computes it as if there were no pool.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvpool import KvSpec, chain_keys, chain_seed, digest
from moonpool_proto.v1 import common_pb2
from moonpool_proto.v1.common_pb2 import ROLE_AGGREGATED, Sampling
from moonpool_proto.v1.worker_pb2 import FINISH_LENGTH, Submit
from rpc.waiting import first_of
from telemetry import RoleMetrics, tracing
from vllm_worker.agent_messages import (
    AGENT_SOCKET,
    COPIES_SOCKET_NAME,
    SPARE_BLOCKS,
    DescribedModel,
    pack,
    unpacker,
)
from vllm_worker.block_locator import BlockLocator
from vllm_worker.copy_channel import CopyReports
from vllm_worker.engine import EngineInVllm, VllmLimits, VllmMemory
from vllm_worker.kv_jobs import KvJob
from worker.config import WorkerConfig
from worker.engine_interface import Engine
from worker.engine_loop import LayerHook, StepResult
from worker.errors import RequestRefused, StartupError
from worker.node import WorkerNode
from worker.prepare import load, prepared, save_prefix, sequence_of
from worker.request import EngineSequence, Request
from worker.shielded_wait import in_thread

log = logging.getLogger(__name__)

_NO_LIMIT_S: Final = 10 * 365 * 86400.0  # vLLM ends its requests
_READ_NBYTES: Final = 1 << 20
_POOL_S: Final = 10.0  # for which vLLM's start waits for the pool node
Send = Callable[..., None]  # (kind, fields...) of a message to the scheduler


class _DescribedEngine(EngineInVllm):
    """The model that vLLM computes, as its scheduler describes it."""

    def __init__(self, model: DescribedModel) -> None:
        self.config = VllmLimits(model.vocab_size, model.max_model_len)
        self.fingerprint = model.fingerprint
        self.computation = model.computation
        self.spec = KvSpec.from_proto(common_pb2.KvSpec.FromString(model.spec))


@dataclass(slots=True, eq=False)
class _ServedRun:
    """A sequence that vLLM computes. It leaves once vLLM and all of its ranks have ended it."""

    sequence: EngineSequence
    save_from: int  # tokens before it were in the slots from the start
    has_ended: bool = False
    num_saved: int | None = None  # tokens whose KV is in the slots, once the ranks have copied it


class ServedRunner:
    """vLLM behind `worker.engine_node.SequenceRunner`: it runs its sequences by itself. Lives on the event loop."""

    computes_in_slots = False

    def __init__(self, on_step: Callable[[StepResult], None], send: Send) -> None:
        self._on_step = on_step
        self._send = send
        self._runs: dict[int, _ServedRun] = {}
        self._numbers = itertools.count()

    @property
    def num_sequences(self) -> int:
        return len(self._runs)

    @property
    def step_in_progress(self) -> int:
        return 0  # steps are vLLM's own

    def submit(self, sequence: EngineSequence) -> None:
        """Tell the scheduler that the reused KV is in the slots."""
        number = next(self._numbers)
        self._runs[number] = _ServedRun(sequence, sequence.num_computed)
        job = KvJob(
            number=number,
            slots=tuple(sequence.slots),
            load_tokens=sequence.num_computed,
            save_from=sequence.num_computed,
            saves_layers=False,
        )
        self._send("job", sequence.request.request_id, job.to_fields())

    def cancel(self, sequence: EngineSequence) -> None:
        sequence.cancelled = True  # it leaves when vLLM has ended it

    def extend(self, sequence: EngineSequence, slots: list[int]) -> None:
        sequence.extend(slots)

    def wake(self) -> None:
        return  # no sequence waits for layers

    def on_layer(self, hook: LayerHook) -> None:
        return  # nothing is handed over

    def sequence(self, number: int) -> EngineSequence | None:
        """Return a sequence that vLLM has not ended."""
        run = self._runs.get(number)
        return None if run is None or run.has_ended else run.sequence

    def ended(self, number: int, ids: bytes, num_tokens: int) -> None:
        """Take the answer of a sequence that vLLM has ended; `num_tokens` of all its tokens have KV."""
        run = self._runs.get(number)
        if run is None or run.has_ended:
            return
        sequence = run.sequence
        room = len(sequence.tokens) - sequence.num_tokens
        answer = np.frombuffer(ids, "<i4")[:room]
        sequence.tokens[sequence.num_tokens : sequence.num_tokens + len(answer)] = answer
        sequence.num_tokens += len(answer)
        sequence.num_computed = max(0, min(num_tokens, sequence.num_tokens))
        sequence.finish = FINISH_LENGTH
        run.has_ended = True
        self._leave(number, run)

    def copies_ended(self, number: int, error: str) -> None:
        """Record that vLLM's ranks no longer use a sequence's slots; `error` says why its KV is not in them."""
        run = self._runs.get(number)
        if run is None:
            return
        if error:
            log.error("the KV of an answer cannot be saved: %s", error)
        run.num_saved = run.save_from if error else len(run.sequence.tokens)
        self._leave(number, run)

    def withdraw(self, request_id: str) -> None:
        """End the sequence of a request whose job vLLM will not use."""
        for number, run in list(self._runs.items()):
            if run.sequence.request.request_id == request_id:
                self._drop(number, run)

    def close(self) -> None:
        """End all sequences: vLLM is gone, and nothing of them is saved."""
        for number, run in list(self._runs.items()):
            self._drop(number, run)

    def _drop(self, number: int, run: _ServedRun) -> None:
        run.has_ended, run.num_saved = True, run.save_from
        self._leave(number, run)

    def _leave(self, number: int, run: _ServedRun) -> None:
        if not run.has_ended or run.num_saved is None:
            return
        del self._runs[number]
        run.sequence.kept_tokens = min(run.num_saved, run.sequence.num_computed)
        self._on_step(StepResult(left=[run.sequence]))


class KvAgent(WorkerNode):
    """The components of a worker around a vLLM that others run. All methods run on the event loop, except `warm_up`."""

    def __init__(
        self, config: WorkerConfig, conductor_targets: tuple[str, ...], model: DescribedModel, send: Send
    ) -> None:
        """`config.messenger.shm_dir` is set: the folder in which vLLM's ranks find the socket.

        The conductors are asked for blocks of other hosts; the agent does not join them. Raises OSError, and
        InvalidArgument for a malformed target.
        """
        assert config.messenger.shm_dir is not None
        self._model = model
        self._send = send
        super().__init__(config, ROLE_AGGREGATED)
        self._locator = BlockLocator(conductor_targets, self.namespace)
        self._seed_name = f"vLLM's prompts {model.fingerprint}"
        self._reports = CopyReports(
            config.messenger.shm_dir / COPIES_SOCKET_NAME,
            num_ranks=model.num_ranks,
            on_layer=lambda layer, spans: None,
            on_end=self._served.copies_ended,
        )

    def _load_engine(self) -> Engine:
        return _DescribedEngine(self._model)

    def _new_runner(self) -> ServedRunner:
        self._served = ServedRunner(self._on_step, self._send)
        return self._served

    def warm_up(self) -> None:
        digest.warm_up()  # neither steps nor grammars run here

    async def _start_engine(self) -> None:
        assert isinstance(self.memory, VllmMemory)
        self._reports.serve(self.memory.layout, self.memory.nbytes, self.memory.writable_fd)

    async def _end_requests(self) -> None:
        self._served.close()
        await super()._end_requests()

    async def _close_engine(self) -> None:
        await self._locator.close()
        await self._reports.close()

    def take(self, message: list[Any]) -> None:
        """Act on a message of the scheduler. Raises ValueError for one that is not understood."""
        kind, *fields = message
        if kind == "begin":
            self._begin(*fields)
        elif kind == "grow":
            self._grow(*fields)
        elif kind == "end":
            self._served.ended(*fields)
        elif kind == "cancel":
            self._served.withdraw(*fields)
            self.jobs.cancel(fields[0], 0)
        else:
            raise ValueError(f"unknown message {kind!r}")

    def _begin(self, request_id: str, ids: bytes, salt: str, max_tokens: int) -> None:
        try:
            request = self._request(request_id, ids, salt, max_tokens)
            # No request may wait for slots, since vLLM's requests do not wait for each other's KV.
            if not self.has_started or self.slots.must_wait(
                -(-self._first_tokens(request) // self.config.block_tokens)
            ):
                self._send("no job", request_id)
            else:
                self.jobs.run(request, self._serve(request))
        except RequestRefused as error:
            log.debug("a request is left to vLLM: %s", error)
            self._send("no job", request_id)

    def _first_tokens(self, request: Request) -> int:
        """Return the tokens for which a request takes slots at its start: more are asked for before they are needed."""
        return min(request.peak_tokens, len(request.prompt) + SPARE_BLOCKS * self.config.block_tokens)

    def _request(self, request_id: str, ids: bytes, salt: str, max_tokens: int) -> Request:
        block_tokens, prompt = self.config.block_tokens, np.frombuffer(ids, "<i4")
        seed = chain_seed(salt, self._seed_name, block_tokens)
        submit = Submit(
            request_id=request_id,
            prompt_ids=ids,
            chain_seed=seed,
            chain=chain_keys(seed, prompt, block_tokens).tobytes(),
            sampling=Sampling(temperature=0.0, top_p=1.0, max_tokens=max_tokens),
            timeout_s=_NO_LIMIT_S,
        )
        return Request.from_proto(
            submit, vocab_size=self.vocab_size, max_model_len=self.max_model_len, block_tokens=block_tokens
        )

    async def _serve(self, request: Request) -> None:
        """Serve one request from its first mention to the store of its KV."""
        is_told = False
        try:
            with tracing.begin("serve", "", **request.span_attributes) as span, self.queued(request):
                await self._locator.locate(request)
                async with prepared(self, request, peak_tokens=self._first_tokens(request)) as work:
                    await load(self, work, span, whole=True)
                    sequence = sequence_of(self, work, None, prefill_only=False)
                    is_told = True
                    await self.run_in_engine(sequence)
                    await save_prefix(self, work, sequence)
        finally:
            if not is_told:
                self._send("no job", request.request_id)

    def _grow(self, number: int, count: int) -> None:
        sequence = self._served.sequence(number)
        slots = None if sequence is None else self.slots.take_more_now(count)
        if sequence is not None and slots is not None:
            sequence.extend(slots)
        self._send("slots", number, slots or [])


async def serve_kv_agent(
    config: WorkerConfig,
    conductor_targets: tuple[str, ...],
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
    metrics: RoleMetrics | None = None,
) -> None:
    """Serve the vLLM whose scheduler started this process, until that ends or `stop` is set.

    Raises StartupError if no scheduler did.
    """
    descriptor = os.environ.pop(AGENT_SOCKET, "")
    if not descriptor:
        raise StartupError("a KV agent is started by MoonpoolConnector in vLLM, not by itself")
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=int(descriptor)))
    messages = _messages(reader)

    def send(*message: Any) -> None:
        if not writer.is_closing():
            writer.write(pack(*message))

    first = await anext(messages, None)
    if first is None or first[0] != "model":
        raise StartupError(f"the first message of vLLM's scheduler must describe its model, got {first!r:.100}")
    agent = KvAgent(config, conductor_targets, DescribedModel(**first[1]), send)
    try:
        await in_thread(agent.warm_up)
        starting = asyncio.ensure_future(agent.start(""))
        await asyncio.wait([starting], timeout=_POOL_S)
        if starting.done():
            starting.result()
        else:
            log.warning("vLLM starts without the pool: the pool node at %s does not answer yet", config.pool_target)
        send("ready")
        if metrics is not None:
            metrics.export_node(agent.sample)
        on_ready("")
        reading = asyncio.ensure_future(_serve_messages(messages, agent))
        await first_of(stop, reading)
        for task in (reading, starting):
            task.cancel()
        for ended in await asyncio.gather(reading, starting, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
    finally:
        await agent.close()
        writer.close()
        shutil.rmtree(config.messenger.shm_dir or "", ignore_errors=True)


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[list[Any]]:
    stream = unpacker()
    while data := await reader.read(_READ_NBYTES):
        stream.feed(data)
        for message in stream:
            yield message


async def _serve_messages(messages: AsyncIterator[list[Any]], agent: KvAgent) -> None:
    async for message in messages:
        agent.take(message)
