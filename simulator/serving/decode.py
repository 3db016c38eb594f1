"""Simulated decode node: allocates pages for whole answers in scheduling order, and batches continuously with the live
batch policy.

Consecutive steps with the same batch are simulated together, as long as the plan is valid. As in the live engine, a
request joins at the next step boundary. Prompts with colocated prefill, and all prompts of an aggregated node, are
computed here, one chunk with each step.
"""

from collections.abc import Callable
from dataclasses import replace

from conductor.policy.events import DecodeSample, Held, NodeReported, PrefillSample
from conductor.policy.placement.decode import peak_tokens
from simulator.serving.clock import NS, SimulatedLink
from simulator.serving.observed_load import ObservedLoad
from simulator.serving.reporter import SimulatedReporter, held_of
from simulator.serving.requests import SimulatedRequest
from simulator.serving.settings import SimulationContext
from worker.policy import BatchLimits, BatchPlan, plan_step
from worker.policy.scheduling_order import WaitQueue

_MOST_STEPS = 32  # simulated together; more would neglect the growing context


class SimulatedDecodeNode:
    """Decode node that holds KV and generates tokens."""

    def __init__(
        self,
        node_id: str,
        context: SimulationContext,
        report: Callable[[NodeReported], object],
        over: Callable[[SimulatedRequest], None],
        prefilled: Callable[[SimulatedRequest], None],
    ) -> None:
        """`prefilled(work)` is called when a prompt was computed here, `over(work)` when an answer is complete."""
        clock, settings = context.clock, context.settings
        self.node_id = node_id
        self.into = SimulatedLink()
        self.free_tokens = settings.capacity_tokens
        self.reporter = SimulatedReporter(node_id, clock, settings, self._held, report)
        self._clock = clock
        self._settings = settings
        self._truth = context.costs
        self._block_tokens = context.block_tokens
        # KV of prompts that are computed here is not pushed: chunks may be smaller than the trace's long blocks.
        block_tokens = min(context.block_tokens, settings.chunk_tokens)
        self._limits = BatchLimits(settings.max_batch, settings.chunk_tokens, block_tokens)
        self._over = over
        self._prefilled = prefilled
        self._wait_queue = WaitQueue()  # requests that wait for pages
        self._waiting: list[tuple[SimulatedRequest, Callable[[SimulatedRequest], None]]] = []
        self._holding: dict[str, SimulatedRequest] = {}
        self._joining: list[SimulatedRequest] = []
        self._running: list[SimulatedRequest] = []
        self._prompts: list[SimulatedRequest] = []  # computed here, in scheduling order at the last step boundary
        self._context_tokens = 0  # of the running requests
        self._plan: BatchPlan | None = None
        self._steps = 0  # number of steps of the current run
        self._step_ns = 0
        self._began_ns = 0
        self._run = 0  # number of the current run of steps; end events of earlier runs are ignored

    @property
    def step_s(self) -> float:
        """Duration of the current step in seconds; 0 if nothing runs."""
        return self._step_ns / 1e9 if self._plan is not None else 0.0

    def backlog_s(self) -> float:
        """Return the seconds of prefill waiting or running on this node, by actual costs."""
        here = [*self._holding.values(), *(work for work, _ in self._waiting)]
        return sum(
            self._truth.chunk_s(self.node_id, work, work.computed or work.reused_tokens, work.job.prompt_tokens)
            for work in here
            if work.prefill_node == self.node_id and not work.first_token_ns
        )

    def observed_load(self) -> ObservedLoad:
        """Return the node's load as its metrics show it."""
        return ObservedLoad(
            num_waiting=len(self._waiting),
            num_running=len(self._running) + len(self._joining),
            prefill_tokens=sum(work.job.prompt_tokens - work.computed for work in self._prompts),
            kv_share=1 - self.free_tokens / self._settings.capacity_tokens,
        )

    def reserve(self, work: SimulatedRequest, ready: Callable[[SimulatedRequest], None]) -> None:
        """Allocate pages for the prompt and the longest answer; calls `ready(work)` once they are allocated."""
        self._wait_queue.add(work.key, work.queue_entry)
        self._waiting.append((work, ready))
        self._serve_waiting()

    def join(self, work: SimulatedRequest) -> None:
        """Decode the request from the next step on; all its KV has arrived."""
        self._joining.append(work)
        self.reporter.progress(work.job.name, "decode_joined")
        self._take_in()

    def prefill(self, work: SimulatedRequest) -> None:
        """Compute the rest of the prompt here and generate the answer; pages and reused blocks are present."""
        work.computed = work.reused_tokens
        self._prompts.append(work)
        self.reporter.progress(work.job.name, "prefill_started")
        self._take_in()

    def release(self, work: SimulatedRequest) -> None:
        """Free the request's pages."""
        del self._holding[work.job.name]
        self.free_tokens += work.committed_tokens
        self.reporter.progress(work.job.name, "ended")
        self._serve_waiting()

    def _take_in(self) -> None:
        if self._plan is None:
            self._next_run()
        else:
            self._stop_after_this_step()

    def _serve_waiting(self) -> None:
        while self._waiting:
            now_s = self._clock.now_ns / NS
            work, ready = first = min(self._waiting, key=lambda waiter: self._wait_queue.rank(waiter[0].key, now_s))
            most = self._settings.max_tokens_of(work.job)
            need = self._settings.held_tokens(peak_tokens(work.job.prompt_tokens, most, self._block_tokens))
            if need > self.free_tokens:
                return
            self._waiting.remove(first)
            self._wait_queue.remove(work.key)
            self.free_tokens -= need
            work.committed_tokens = need
            self._holding[work.job.name] = work
            self.reporter.accepted()
            ready(work)

    def _next_run(self) -> None:
        now_ns = self._clock.now_ns
        for work in self._joining:
            work.last_token_ns = work.first_token_ns
            self._context_tokens += self._context_of(work)
        self._running += self._joining
        self._joining = []
        self._run += 1
        self._prompts.sort(key=lambda work: work.queue_entry.rank(now_ns / NS))
        plan = plan_step(
            [work.job.output_tokens - work.generated for work in self._running],
            [(work.computed, work.job.prompt_tokens) for work in self._prompts],
            self._limits,
        )
        if plan.is_empty:
            self._plan = None
            return
        batch = len(plan.decode)
        takes_turns = batch < len(self._running)
        context = self._context_tokens * batch // max(1, len(self._running))
        self._steps = 1 if takes_turns else min(plan.valid_steps, _MOST_STEPS)
        mean_context = context + batch * (self._steps - 1) // 2
        if self._settings.window_tokens:
            mean_context = min(mean_context, batch * self._settings.window_tokens)
        seconds = self._truth.step_s(self.node_id, batch, mean_context) if batch else 0.0
        if not plan.prefill:
            self.reporter.decode(DecodeSample(batch, context, seconds))
        chunks_s = sum(
            self._truth.chunk_s(self.node_id, self._prompts[chunk.index], chunk.start, chunk.end)
            for chunk in plan.prefill
        )
        seconds = seconds + chunks_s if self._settings.merged_steps == "sum" else max(seconds, chunks_s)
        num_tokens = sum(chunk.end - chunk.start for chunk in plan.prefill)
        for chunk in plan.prefill:  # as the live engine accounts for a merged step
            self._prompts[chunk.index].prefill_s += seconds * (chunk.end - chunk.start) / num_tokens
        self._step_ns = max(1, round(seconds * 1e9))
        self._plan, self._began_ns = plan, now_ns
        self._end_run_at(now_ns + self._steps * self._step_ns)

    def _end_run_at(self, time_ns: int) -> None:
        number = self._run
        self._clock.at(time_ns, lambda: self._end_run(number))

    def _stop_after_this_step(self) -> None:
        done = (self._clock.now_ns - self._began_ns) // self._step_ns + 1
        if done < self._steps:
            self._steps = done
            self._run += 1
            self._end_run_at(self._began_ns + done * self._step_ns)

    def _end_run(self, number: int) -> None:
        if number != self._run:
            return
        assert self._plan is not None
        plan = self._plan
        steps, now_ns = self._steps, self._clock.now_ns
        stepped = self._running[: len(plan.decode)]
        left: list[SimulatedRequest] = []
        for work in stepped:
            # The first interval may be longer than a step: the request has just joined, or was not in the batch.
            gap_ns = self._began_ns + self._step_ns - work.last_token_ns
            work.intervals.append((gap_ns, 1))
            if steps > 1:
                work.intervals.append((self._step_ns, steps - 1))
            work.last_token_ns = now_ns
            before = self._context_of(work)
            work.generated += steps
            self._context_tokens += self._context_of(work) - before
            if work.generated >= work.job.output_tokens:
                left.append(work)
        # As in the live engine, sequences take turns if there are more than batch rows.
        self._running = self._running[len(stepped) :] + stepped
        left += self._prompts_stepped(plan)
        if left:
            self._running = [work for work in self._running if work.generated < work.job.output_tokens]
        for work in left:
            self._context_tokens -= self._context_of(work)
            self.release(work)
            self._over(work)
        self._next_run()

    def _prompts_stepped(self, plan: BatchPlan) -> list[SimulatedRequest]:
        """Advance prompts by one step and end the requests whose answer is a single token."""
        for chunk in plan.prefill:
            self._prompts[chunk.index].computed = chunk.end
        done = [self._prompts[chunk.index] for chunk in plan.prefill if chunk.last]
        for work in done:
            self._prompts.remove(work)
            work.first_token_ns = work.last_token_ns = self._clock.now_ns
            work.generated = 1
            # As on the live node: a sample from a decode node would not describe prefill nodes.
            if self._settings.is_aggregated:
                new = work.job.prompt_tokens - work.reused_tokens
                self.reporter.prefill(PrefillSample(new, work.reused_tokens, work.prefill_s))
            self.reporter.progress(work.job.name, "prefill_ended")
            self._prefilled(work)
            self._running.append(work)
            self._context_tokens += self._context_of(work)
        return [work for work in done if work.generated >= work.job.output_tokens]

    def _context_of(self, work: SimulatedRequest) -> int:
        return self._settings.held_tokens(work.job.prompt_tokens + work.generated)

    def _held(self) -> tuple[Held, ...]:
        return tuple(self._held_one(work) for work in self._holding.values())

    def _held_one(self, work: SimulatedRequest) -> Held:
        if work.prefill_node == self.node_id:
            held = held_of(work, self._clock.now_ns / NS, self._settings)
            return replace(held, committed_tokens=work.committed_tokens)
        job = work.job
        return Held(
            job.name,
            0,
            work.committed_tokens,
            prompt_tokens=self._settings.held_tokens(job.prompt_tokens),
            max_new_tokens=self._settings.max_tokens_of(job),
        )
