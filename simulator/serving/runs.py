"""Simulated runs: a single run, many runs in parallel processes, and the evaluation of rejections.

A rejection is evaluated in a fork of the simulation in which the request is admitted. Both have the same history, and
random values belong to requests and nodes, so the two differ only by this decision and its consequences. Requires an
operating system with fork.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from conductor.policy import PolicyConfig
from settings.conductor import AdmissionMode
from simulator.serving.clock import NS
from simulator.serving.cluster import SimulatedCluster
from simulator.serving.hot_prefixes import HotPrefixes, draw_hot_workload
from simulator.serving.outcome import ServingOutcome, is_good, outcome_of, swing_of
from simulator.serving.requests import SimulatedRequest, SimulatedWorkload, draw_workload
from simulator.serving.settings import ServingSettings
from simulator.serving.variation import Variation
from traces import Trace, load_trace
from worker.policy.cost_profile import load_profile


class FalseRejects:
    """Evaluation of a sample of the rejections of one run."""

    def __init__(self, cluster: SimulatedCluster, share: float, from_ns: int) -> None:
        """Evaluate about `share` of the rejected requests that arrived from `from_ns` on.

        The sampled requests are the same in all runs of a workload.
        """
        self.num_tried = 0
        self.num_false = 0
        self._cluster = cluster
        self._share = share
        self._from_ns = from_ns
        if share:
            cluster.on_reject = self._look_into

    def _look_into(self, work: SimulatedRequest, let_in: Callable[[], SimulatedRequest]) -> None:
        if work.job.is_sampled < self._share and work.job.arrival_ns >= self._from_ns:
            self.num_tried += 1
            self.num_false += in_a_copy(lambda: self._would_be_good(let_in))

    def _would_be_good(self, let_in: Callable[[], SimulatedRequest]) -> bool:
        cluster = self._cluster
        cluster.on_reject = lambda work, let_in: None
        work = let_in()
        cluster.clock.run(lambda: work.end is None)
        return is_good(work, cluster.settings)


def in_a_copy(question: Callable[[], bool]) -> bool:
    """Call a function in a forked process, so that its side effects are discarded, and return its result.

    Raises ChildProcessError if the process fails; its traceback is on stderr.
    """
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            status = int(question())
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    _, ended = os.waitpid(pid, 0)
    status = os.waitstatus_to_exitcode(ended)
    if status not in (0, 1):
        raise ChildProcessError(f"the forked simulation failed (status {status})")
    return bool(status)


_SAMPLE_S = 1.0
WARM_UP = 0.15  # unmeasured fraction at the start, in which queues and pools fill and cost estimates converge


@dataclass(frozen=True, slots=True)
class RunSpec:
    """All inputs of a run."""

    trace: str
    profile: Path
    settings: ServingSettings
    policy: PolicyConfig
    seed: int
    rate_per_s: float
    requests: int
    output_scale: float = 1.0
    longest_prompt: int = 0
    look_into: float = 0.0  # fraction of the rejections that are evaluated in a fork
    hot: HotPrefixes | None = None  # drawn instead of the trace's conversations
    variation: Variation | None = None  # of the trace's conversations over time


@dataclass(frozen=True, slots=True)
class ServingRun:
    """Results of a run. The load series are means over the nodes, relative to the objectives, one sample per second."""

    mode: AdmissionMode
    seed: int
    outcome: ServingOutcome
    rejects_tried: int
    rejects_false: int
    prefill_load: tuple[float, ...]
    decode_load: tuple[float, ...]
    copied_bytes: int  # of prefixes, by decisions to copy, over the whole run
    fetched_bytes: int  # read by prefill nodes from other hosts' pools, over the whole run


def run_one(spec: RunSpec) -> ServingRun:
    """Simulate one run; deterministic. Raises BadSetting, TraceError, ProfileError."""
    settings, workload = spec.settings, workload_of(spec)
    cluster = SimulatedCluster(settings, spec.policy, load_profile(spec.profile), workload, spec.seed)
    prefill: list[float] = []
    decode: list[float] = []

    def sample() -> None:
        prefill.append(_mean(backlog_s / settings.ttft_objective_s for backlog_s in cluster.backlogs_s()))
        decode.append(_mean(node.step_s / settings.tbt_objective_s for node in cluster.decode.values()))
        if cluster.clock.now_ns < workload.duration_s * NS:
            cluster.clock.after(round(_SAMPLE_S * NS), sample)

    cluster.clock.at(0, sample)
    from_s = WARM_UP * workload.duration_s
    oracle = FalseRejects(cluster, spec.look_into, round(from_s * NS))
    cluster.run()
    first = round(from_s / _SAMPLE_S)
    swing = swing_of(np.array(prefill[first:]), np.array(decode[first:]), step_s=_SAMPLE_S)
    outcome = outcome_of(cluster.works, settings, swing, from_s=from_s, until_s=workload.duration_s)
    mode = spec.policy.admission_mode
    return ServingRun(
        mode,
        spec.seed,
        outcome,
        oracle.num_tried,
        oracle.num_false,
        _rounded(prefill),
        _rounded(decode),
        cluster.copied_bytes,
        sum(node.fetched_bytes for node in cluster.prefill.values()),
    )


@cache
def _trace(source: str) -> Trace:
    """Return a trace, which the runs of one process share."""
    return load_trace(source)


def workload_of(spec: RunSpec) -> SimulatedWorkload:
    """Draw the requests of a run. Raises BadSetting, TraceError."""
    trace = _trace(spec.trace)
    if spec.hot is not None:
        return draw_hot_workload(
            spec.hot,
            seed=spec.seed,
            rate_per_s=spec.rate_per_s,
            requests=spec.requests,
            block_tokens=trace.block_tokens,
        )
    drawn = draw_workload(
        trace,
        seed=spec.seed,
        rate_per_s=spec.rate_per_s,
        requests=spec.requests,
        output_scale=spec.output_scale,
        longest_prompt=spec.longest_prompt,
        longest_answer=spec.settings.max_new_tokens,
    )
    return drawn if spec.variation is None else spec.variation.of(drawn, spec.settings.max_new_tokens)


def worker_pool(processes: int) -> ProcessPoolExecutor:
    """Return a pool of spawned processes. They fork for evaluations, so they must not have threads."""
    return ProcessPoolExecutor(processes, mp_context=get_context("spawn"))


def run_all(
    specs: Sequence[RunSpec],
    pool: ProcessPoolExecutor,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[ServingRun]:
    """Execute all runs, in the order of `specs`. Calls `progress(done, total)`."""
    numbers = {pool.submit(run_one, spec): number for number, spec in enumerate(specs)}
    runs: dict[int, ServingRun] = {}
    try:
        for done, future in enumerate(as_completed(numbers), 1):
            runs[numbers[future]] = future.result()
            progress(done, len(specs))
    finally:
        for future in numbers:
            future.cancel()
    return [runs[number] for number in range(len(specs))]


def with_mode(spec: RunSpec, mode: AdmissionMode) -> RunSpec:
    """Return the same run under another admission mode."""
    return replace(spec, policy=replace(spec.policy, admission_mode=mode))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _rounded(values: list[float]) -> tuple[float, ...]:
    return tuple(round(value, 4) for value in values)
