"""What is run when admission modes are compared: what a person says, and the machine's figures from its profile."""

from pathlib import Path

from settings.conductor import PolicyConfig
from settings.keys import InvalidSetting
from simulator.errors import BadSetting
from simulator.serving.runs import RunSpec
from simulator.serving.settings import ServingSettings
from traces import load_trace
from worker.policy.cost_profile import CostProfile, load_profile


def overload_spec(
    trace: str,
    profile: Path,
    *,
    prefill_nodes: int,
    decode_nodes: int,
    ttft_s: float,
    tbt_s: float,
    requests: int,
    output_scale: float,
    longest_prompt: int,
    longest_answer: int,
    pool_blocks: int,
    ssd_blocks: int,
    look_into: float,
    attained_share: float,
) -> RunSpec:
    """Clients allow `longest_answer` tokens; 0: as many as the longest answer has.

    Raises BadSetting, TraceError, ProfileError.
    """
    rows, costs = load_trace(trace), load_profile(profile)
    if not 0 < output_scale < 1000:
        raise BadSetting(f"output_scale is {output_scale}; give a number above 0 and below 1000")
    longest_answer = longest_answer or max(1, round(output_scale * max(row.output_length for row in rows)))
    standard = ServingSettings()
    capacity_tokens = _setting(costs, "capacity_tokens", standard.capacity_tokens)
    settings = ServingSettings(
        prefill_nodes=prefill_nodes,
        decode_nodes=decode_nodes,
        ttft_objective_s=ttft_s,
        tbt_objective_s=tbt_s,
        max_new_tokens=longest_answer,
        capacity_tokens=capacity_tokens // rows.block_tokens * rows.block_tokens,
        max_batch=_setting(costs, "max_batch", standard.max_batch),
        pool_blocks=pool_blocks,
        ssd_blocks=ssd_blocks,
    )
    longest = max(
        (row.input_length for row in rows if not longest_prompt or row.input_length <= longest_prompt), default=0
    )
    if longest + longest_answer + rows.block_tokens > settings.capacity_tokens:
        raise BadSetting(
            f"a node of profile {costs.name} holds {settings.capacity_tokens} tokens of KV; the longest request needs "
            f"{longest} and {longest_answer} for its answer: leave it out with --longest-prompt"
        )
    try:
        policy = PolicyConfig(ttft_slo_s=ttft_s, tbt_slo_s=tbt_s, attained_share=attained_share, report_timeout_s=0.0)
    except InvalidSetting as error:
        raise BadSetting(str(error)) from error
    return RunSpec(
        trace=trace,
        profile=profile,
        settings=settings,
        policy=policy,
        seed=0,
        rate_per_s=1.0,
        requests=requests,
        output_scale=output_scale,
        longest_prompt=longest_prompt,
        look_into=look_into,
    )


def _setting(costs: CostProfile, name: str, standard: int) -> int:
    value = costs.engine.get(name, standard)
    if type(value) is not int:
        raise BadSetting(f"engine.{name} of profile {costs.name} is {value!r}; give a whole number")
    return value
