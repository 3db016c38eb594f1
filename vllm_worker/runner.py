"""AsyncLLM as a worker's engine: sequences in, a StepResult per output. Lives on the event loop.

vLLM computes in processes of its own. They end with this one; if one of them ends by itself, the engine is broken, and
the worker with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import statistics
from collections.abc import Callable
from typing import Any, Final

from vllm_worker.requests import prompt_of, record_prompt, replayed, sampling_params, token_logprobs
from worker.engine_loop import GeneratedToken, StepResult
from worker.errors import RequestFailed, RequestRefused
from worker.request import EngineSequence

log = logging.getLogger(__name__)

_CHECK_S: Final = 1.0
Decoded = Callable[[int, int, float], None]  # (batch, context tokens, seconds) of a step that only decoded


class VllmRunner:
    """Engine of a worker behind `worker.engine_node.SequenceRunner`."""

    def __init__(self, llm: Any, on_step: Callable[[StepResult], None], on_decode: Decoded) -> None:
        """`llm` is an AsyncLLM that reports its statistics here; `start` makes one."""
        self._on_step = on_step
        self._on_decode = on_decode
        self._running: dict[int, tuple[EngineSequence, asyncio.Task[None]]] = {}  # by id of the sequence
        self._names = itertools.count()
        self._watching: asyncio.Task[None] | None = None
        self.usage = 0.0  # of the KV cache, from 0 to 1
        self.preemptions = 0
        self._llm = llm

    @classmethod
    def start(cls, vllm_config: Any, on_step: Callable[[StepResult], None], on_decode: Decoded) -> VllmRunner:
        """Start vLLM's processes and load the model: blocks for long. Raises the errors of vLLM."""
        from vllm.v1.engine.async_llm import AsyncLLM

        runner = cls(None, on_step, on_decode)
        runner._llm = AsyncLLM.from_vllm_config(vllm_config, stat_loggers=[runner._logger])
        return runner

    @property
    def config(self) -> Any:
        """VllmConfig of the engine, as vLLM completed it."""
        return self._llm.vllm_config

    @property
    def num_sequences(self) -> int:
        return len(self._running)

    async def warm_up(self) -> None:
        """Compute one prompt with everything that vLLM compiles when it is first needed."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=1, detokenize=False, ignore_eos=True)
        async for _ in self._llm.generate(tokens_input([0, 1]), params, "warm-up"):
            pass
        await self._llm.reset_prefix_cache()

    def watch(self) -> None:
        """Begin to look for the end of vLLM's processes while no request would notice it."""
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while not self._llm.errored:  # noqa: ASYNC110  # vLLM sets no event
            await asyncio.sleep(_CHECK_S)
        self._ended(self._llm.dead_error)

    def submit(self, sequence: EngineSequence) -> None:
        name = f"{sequence.request.request_id}-{sequence.request.attempt}-{next(self._names)}"
        task = asyncio.create_task(self._generate(sequence, name))
        self._running[id(sequence)] = sequence, task
        # A callback, because a task that is cancelled before its first step never runs its own code.
        task.add_done_callback(lambda ended: self._left(sequence, ended))

    def cancel(self, sequence: EngineSequence) -> None:
        running = self._running.get(id(sequence))
        if running is not None:
            sequence.cancelled = True
            running[1].cancel()  # vLLM aborts a request whose reader is cancelled

    async def close(self) -> None:
        """End all sequences and vLLM's processes."""
        tasks = [task for _, task in self._running.values()]
        tasks += [self._watching] if self._watching is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._llm.shutdown)

    def _left(self, sequence: EngineSequence, ended: asyncio.Task[None]) -> None:
        del self._running[id(sequence)]
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

    async def _generate(self, sequence: EngineSequence, name: str) -> None:
        from vllm.inputs.engine import tokens_input

        request = sequence.request
        prompt, skip = prompt_of(request), replayed(request)
        # The salt keeps vLLM's own prefix cache from sharing KV between tenants that must not share it.
        asked = tokens_input(prompt, cache_salt=request.chain_seed.hex())
        outputs = self._llm.generate(asked, sampling_params(request), name)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                self._began(sequence, output, prompt)
                answer = output.outputs[0]
                ids = list(answer.token_ids)
                fresh = ids[skip:]
                logprobs = (answer.logprobs or [None] * len(ids))[len(ids) - len(fresh) :]
                skip -= len(ids) - len(fresh)
                self._take(sequence, fresh, logprobs)
                if output.finished and not sequence.has_ended:
                    raise RequestFailed("engine", f"vLLM ended the answer early: {answer.finish_reason}")
                if sequence.has_ended:
                    return

    def _began(self, sequence: EngineSequence, output: Any, prompt: list[int]) -> None:
        times = output.metrics
        if times is not None and times.is_corrupted:
            raise RequestFailed("engine", "the logits contain NaN: the model's weights or its KV are damaged")
        if sequence.first_token_at or times is None or not times.first_token_ts:
            return
        sequence.first_step_at, sequence.first_token_at = times.scheduled_ts, times.first_token_ts
        sequence.compute_s = times.first_token_ts - times.scheduled_ts
        sequence.reused_tokens = output.num_cached_tokens or 0
        sequence.computed_tokens = len(sequence.request.prompt) - sequence.reused_tokens
        if sequence.prompt_scores is not None and output.prompt_logprobs is not None:
            record_prompt(sequence.prompt_scores, output.prompt_logprobs, prompt)

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
        if scheduler is not None:
            self.usage = scheduler.kv_cache_usage
        if iteration is None:
            return
        self.preemptions += iteration.num_preempted_reqs
        gaps = iteration.inter_token_latencies_iter
        if gaps and not iteration.time_to_first_tokens_iter:
            context = sum(sequence.num_tokens for sequence, _ in self._running.values())
            self._on_decode(len(gaps), context, statistics.median(gaps))
