"""Simulated runs under overload: options from the command line, node limits from the cost profile."""

from dataclasses import dataclass
from pathlib import Path

from settings.conductor import PolicyConfig
from settings.keys import InvalidSetting
from simulator.errors import BadSetting
from simulator.serving.runs import RunSpec
from simulator.serving.settings import ServingSettings
from simulator.serving.siblings import SiblingReuse
from traces import load_trace
from worker.policy.cost_profile import CostProfile, load_profile
from worker.policy.reuse_profile import load_reuse_profile


@dataclass(frozen=True, slots=True)
class OverloadScenario:
    """Options of a simulation under overload, as given on the command line; blocks are those of the trace."""

    trace: str  # name or path
    profile: Path  # cost profile of the nodes
    prefill_nodes: int
    decode_nodes: int
    ttft_s: float  # objective
    tbt_s: float  # objective
    requests: int
    output_scale: float  # factor on the trace's output lengths
    longest_prompt: int  # longer prompts are left out; 0: no limit
    longest_answer: int  # max_tokens of all requests; 0: the longest answer of the trace
    pool_blocks: int  # capacity of a pool node's memory
    ssd_blocks: int  # capacity of its SSD
    look_into: float  # fraction of rejections that are evaluated by admitting the request in a forked run
    attained_share: float
    window_tokens: int = 0  # sinks and rolling window of every request; 0: none slides
    reuse_profile: Path | None = None  # of the sibling that has computed the prompts of conversations
    sibling_share: float = 0.0  # of the conversations


def overload_spec(scenario: OverloadScenario) -> RunSpec:
    """Return the run that `scenario` describes, with node limits from its cost profile.

    Raises BadSetting, TraceError, ProfileError.
    """
    siblings = _siblings(scenario.reuse_profile, scenario.sibling_share)
    rows, costs = load_trace(scenario.trace), load_profile(scenario.profile)
    if not 0 < scenario.output_scale < 1000:
        raise BadSetting(f"output_scale must be above 0 and below 1000, got {scenario.output_scale}")
    longest_answer = scenario.longest_answer or max(
        1, round(scenario.output_scale * max(row.output_length for row in rows))
    )
    standard = ServingSettings()
    capacity_tokens = _setting(costs, "capacity_tokens", standard.capacity_tokens)
    settings = ServingSettings(
        prefill_nodes=scenario.prefill_nodes,
        decode_nodes=scenario.decode_nodes,
        ttft_objective_s=scenario.ttft_s,
        tbt_objective_s=scenario.tbt_s,
        max_new_tokens=longest_answer,
        capacity_tokens=capacity_tokens // rows.block_tokens * rows.block_tokens,
        max_batch=_setting(costs, "max_batch", standard.max_batch),
        pool_blocks=scenario.pool_blocks,
        ssd_blocks=scenario.ssd_blocks,
        window_tokens=scenario.window_tokens,
        siblings=siblings,
    )
    if scenario.window_tokens and scenario.window_tokens < 2 * rows.block_tokens:
        raise BadSetting(
            f"--endless-window must be 0 or at least {2 * rows.block_tokens}, two blocks of the trace, "
            f"got {scenario.window_tokens}"
        )
    longest = max(
        (
            row.input_length
            for row in rows
            if not scenario.longest_prompt or row.input_length <= scenario.longest_prompt
        ),
        default=0,
    )
    if settings.held_tokens(longest + longest_answer + rows.block_tokens) > settings.capacity_tokens:
        raise BadSetting(
            f"a node of profile {costs.name} holds {settings.capacity_tokens} tokens of KV, but the longest request "
            f"needs {longest} and {longest_answer} for its answer; leave it out with --longest-prompt"
        )
    try:
        policy = PolicyConfig(
            ttft_slo_s=scenario.ttft_s,
            tbt_slo_s=scenario.tbt_s,
            attained_share=scenario.attained_share,
            report_timeout_s=0.0,
        )
    except InvalidSetting as error:
        raise BadSetting(str(error)) from error
    return RunSpec(
        trace=scenario.trace,
        profile=scenario.profile,
        settings=settings,
        policy=policy,
        seed=0,
        rate_per_s=1.0,
        requests=scenario.requests,
        output_scale=scenario.output_scale,
        longest_prompt=scenario.longest_prompt,
        look_into=scenario.look_into,
    )


def _siblings(reuse_profile: Path | None, share: float) -> SiblingReuse | None:
    if reuse_profile is None:
        if share:
            raise BadSetting("--sibling-share needs --reuse-profile, which says what reuse of a sibling's KV costs")
        return None
    return SiblingReuse(load_reuse_profile(reuse_profile), share)


def _setting(costs: CostProfile, name: str, standard: int) -> int:
    value = costs.engine.get(name, standard)
    if type(value) is not int:
        raise BadSetting(f"engine.{name} of profile {costs.name} must be an integer, got {value!r}")
    return value
