"""AsyncLLM as a worker's engine: sequences in, a StepResult per output. Lives on the event loop.

vLLM computes in processes of its own. They end with this one; if one of them ends by itself, the engine is broken, and
the worker with it.

A sequence leaves when vLLM has ended its request and every rank has reported that it no longer uses its slots
(`vllm_worker.connector`): by then the KV of its tokens is in them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from vllm_worker.copy_channel import Spans
from vllm_worker.requests import kv_job, num_replayed, prompt_of, record_prompt, sampling_params, token_logprobs
from vllm_worker.step_work import STEPS
from worker.engine_loop import GeneratedToken, LayerHook, StepResult
from worker.errors import RequestFailed, RequestRefused
from worker.request import EngineSequence
from worker.shielded_wait import shielded

log = logging.getLogger(__name__)

_CHECK_S: Final = 1.0
Decoded = Callable[[int, int, float], None]  # (batch, context tokens, seconds) of a step that only decoded


@dataclass(slots=True, eq=False)
class _Run:
    """A sequence in vLLM. `ended` gets the error of its copies, or "", once vLLM no longer uses its slots."""

    sequence: EngineSequence
    number: int
    save_from: int  # tokens before it were in the slots from the start
    ended: asyncio.Future[str]
    task: asyncio.Task[None] | None = None


class VllmRunner:
    """Engine of a worker behind `worker.engine_node.SequenceRunner`."""

    computes_in_slots = False

    def __init__(self, on_step: Callable[[StepResult], None], on_decode: Decoded) -> None:
        self._on_step = on_step
        self._on_decode = on_decode
        self._on_layer: LayerHook | None = None
        self._runs: dict[int, _Run] = {}  # by id of the sequence
        self._by_number: dict[int, _Run] = {}
        self._numbers = itertools.count()
        self._watching: asyncio.Task[None] | None = None
        self._num_steps = 0  # that vLLM has reported
        self.usage = 0.0  # of the KV cache, from 0 to 1
        self.preemptions = 0
        self._llm: Any = None

    async def start(self, vllm_config: Any) -> None:
        """Start vLLM's processes, load the model and compute a first prompt. Raises the errors of vLLM."""
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = await asyncio.to_thread(AsyncLLM.from_vllm_config, vllm_config, stat_loggers=[self._logger])
        await self._warm_up()
        self._watching = asyncio.create_task(self._watch())

    @property
    def config(self) -> Any:
        """VllmConfig of the engine, as vLLM completed it."""
        return self._llm.vllm_config

    @property
    def num_sequences(self) -> int:
        return len(self._runs)

    @property
    def step_in_progress(self) -> int:
        """Number that changes with every step that vLLM reports, while it has sequences; 0 without sequences."""
        return self._num_steps + 1 if self._runs else 0

    async def _warm_up(self) -> None:
        """Compute one prompt with everything that vLLM compiles when it is first needed."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=1, detokenize=False, ignore_eos=True)
        async for _ in self._llm.generate(tokens_input([0, 1]), params, "warm-up"):
            pass
        await self._llm.reset_prefix_cache()

    async def _watch(self) -> None:
        """Look for the end of vLLM's processes while no request would notice it."""
        while not self._llm.errored:  # noqa: ASYNC110  # vLLM sets no event
            await asyncio.sleep(_CHECK_S)
        self._ended(self._llm.dead_error)

    def submit(self, sequence: EngineSequence) -> None:
        sequence.steering = None  # logits are changed in vLLM's processes
        run = _Run(sequence, next(self._numbers), sequence.num_computed, asyncio.get_running_loop().create_future())
        self._runs[id(sequence)] = self._by_number[run.number] = run
        run.task = asyncio.create_task(self._run(run))
        # A callback, because a task that is cancelled before its first step never runs its own code.
        run.task.add_done_callback(lambda ended: self._left(run, ended))

    def cancel(self, sequence: EngineSequence) -> None:
        run = self._runs.get(id(sequence))
        if run is not None and run.task is not None and not sequence.cancelled:
            sequence.cancelled = True
            run.task.cancel()

    def extend(self, sequence: EngineSequence, slots: list[int]) -> None:
        sequence.extend(slots)

    def wake(self) -> None:
        return  # no sequence waits for layers

    def on_layer(self, hook: LayerHook) -> None:
        self._on_layer = hook

    async def close(self) -> None:
        """End all sequences and vLLM's processes."""
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        tasks += [self._watching] if self._watching is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)

    # Reports of vLLM's processes.

    def layer_saved(self, layer: int, spans: Spans) -> None:
        """Pass on that a layer of prompts is in their slots."""
        runs = [(self._by_number.get(number), start, end) for number, start, end in spans]
        chunks = [(run.sequence, start, end) for run, start, end in runs if run is not None]
        if self._on_layer is not None and chunks:
            self._on_layer(layer, chunks)

    def copies_ended(self, number: int, error: str) -> None:
        """Record that vLLM no longer uses a sequence's slots; `error` says why its KV is not in them."""
        run = self._by_number.get(number)
        if run is not None and not run.ended.done():
            run.ended.set_result(error)

    # One sequence.

    def _left(self, run: _Run, ended: asyncio.Task[None]) -> None:
        sequence = run.sequence
        del self._runs[id(sequence)], self._by_number[run.number]
        problem = None if ended.cancelled() else ended.exception()
        error = None if problem is None else self._judged(sequence, problem)
        self._on_step(StepResult(left=[sequence], error=error, is_end=error is not None))

    def _judged(self, sequence: EngineSequence, problem: BaseException) -> BaseException | None:
        """Set the error of the sequence, or return the error of the engine."""
        from vllm.exceptions import VLLMValidationError

        if self._llm.errored:
            return problem
        if isinstance(problem, VLLMValidationError | ValueError):
            sequence.error = RequestRefused("bad_request", f"vLLM refuses the request: {problem}")
        elif isinstance(problem, RequestFailed):
            sequence.error = problem
        else:
            log.error("vLLM failed a request", exc_info=problem)
            sequence.error = RequestFailed("engine", f"vLLM failed: {type(problem).__name__}: {problem}")
        return None

    async def _run(self, run: _Run) -> None:
        """Run a sequence until its slots are no longer used."""
        from vllm.inputs.engine import tokens_input

        request = run.sequence.request
        name = f"{request.request_id}-{request.attempt}-{run.number}"
        # The salt keeps vLLM's own prefix cache from sharing KV between tenants that must not share it.
        prompt = tokens_input(prompt_of(run.sequence), cache_salt=request.chain_seed.hex())
        job = kv_job(run.sequence, run.number)
        # A separate task: even if cancelled, this one must learn whether vLLM has the request, to end it.
        adding = asyncio.ensure_future(self._llm.add_request(name, prompt, sampling_params(run.sequence, job)))
        try:
            await self._generate(run.sequence, await shielded(adding))
        finally:
            if not adding.cancelled() and adding.exception() is None:
                await shielded(asyncio.ensure_future(self._end(run, adding.result())))

    async def _generate(self, sequence: EngineSequence, outputs: Any) -> None:
        skip = num_replayed(sequence)
        is_finished = False
        while not is_finished:
            output = outputs.get_nowait() or await outputs.get()
            is_finished = output.finished
            self._began(sequence, output)
            answer = output.outputs[0]
            ids = list(answer.token_ids)
            fresh = ids[skip:]
            logprobs = (answer.logprobs or [None] * len(ids))[len(ids) - len(fresh) :]
            skip -= len(ids) - len(fresh)
            self._take(sequence, fresh, logprobs)
            if is_finished and not sequence.has_ended and not sequence.prefill_only:
                raise RequestFailed("engine", f"vLLM ended the answer early: {answer.finish_reason}")
            if sequence.has_ended:
                return

    async def _end(self, run: _Run, outputs: Any) -> None:
        """End the request in vLLM, if it has not ended, and wait until its slots are no longer used."""
        await self._llm.abort(outputs.request_id, internal=True)
        while not run.ended.done() and not self._llm.errored:
            await asyncio.wait([run.ended], timeout=_CHECK_S)
        error = run.ended.result() if run.ended.done() else ""
        sequence = run.sequence
        if error and sequence.prefill_only:  # another node is to continue from this KV
            sequence.error = RequestFailed("engine", f"the prompt's KV could not be copied from vLLM: {error}")
        elif error:
            log.error("the KV of an answer cannot be saved: %s", error)
            sequence.kept_tokens = min(run.save_from, sequence.kept_tokens or sequence.num_tokens)

    def _began(self, sequence: EngineSequence, output: Any) -> None:
        times = output.metrics
        if times is not None and times.is_corrupted:
            raise RequestFailed("engine", "the logits contain NaN: the model's weights or its KV are damaged")
        if sequence.first_token_at or times is None or not times.first_token_ts:
            return
        sequence.first_step_at, sequence.first_token_at = times.scheduled_ts, times.first_token_ts
        sequence.reused_tokens = min(output.num_cached_tokens or 0, sequence.prompt_len)
        if sequence.prompt_scores is not None and output.prompt_logprobs is not None:
            record_prompt(sequence.prompt_scores, output.prompt_logprobs, prompt_of(sequence))

    def _take(self, sequence: EngineSequence, ids: list[int], logprobs: list[Any]) -> None:
        num_top = sequence.request.sampling.logprobs
        tokens: list[GeneratedToken] = []
        for token, found in zip(ids, logprobs, strict=True):
            index = sequence.next_index
            if sequence.has_ended or not sequence.try_append(token):
                break
            scored = None if num_top is None or found is None else token_logprobs(found, token, num_top)
            tokens.append(GeneratedToken(sequence, index, token, sequence.finish, scored))
        if tokens:
            sequence.num_computed = sequence.num_tokens - 1
            self._on_step(StepResult(tokens=tokens))

    def _ended(self, error: BaseException) -> None:
        self._on_step(StepResult(error=error, is_end=True))

    def _logger(self, vllm_config: Any, engine_index: int = 0) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        runner = self

        class Statistics(StatLoggerBase):  # type: ignore[misc]  # vllm is not installed where types are checked
            def __init__(self) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                runner._record(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                pass

        return Statistics()

    def _record(self, scheduler: Any, iteration: Any) -> None:
        self._num_steps += 1
        if scheduler is not None:
            self.usage = scheduler.kv_cache_usage
            for seconds, prompts, batch, context_tokens in (scheduler.kv_connector_stats or {}).get(STEPS, ()):
                self._stepped(seconds, prompts, batch, context_tokens)
        if iteration is not None:
            self.preemptions += iteration.num_preempted_reqs

    def _stepped(self, seconds: float, prompts: list[tuple[int, int]], batch: int, context_tokens: int) -> None:
        """Divide the duration of a step among the prompts that it computed."""
        if batch and not prompts:
            self._on_decode(batch, context_tokens, seconds)
        computed = sum(count for _, count in prompts)
        for number, count in prompts:
            run = self._by_number.get(number)
            if run is not None:
                run.sequence.computed_tokens += count
                run.sequence.compute_s += seconds * count / computed
                run.sequence.is_beside_decodes |= batch > 0
