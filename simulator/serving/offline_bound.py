"""Upper bound of goodput for an admission that knows all requests in advance, with the lengths of their answers."""

from typing import Final

import numpy as np

from conductor.policy.shadow_prices import decode_need_s, fitting_prices
from simulator.serving.clock import NS
from simulator.serving.requests import SimulatedWorkload
from simulator.serving.settings import ServingSettings
from worker.policy.cost_profile import CostProfile

_MANY: Final = 1_000_000


def offline_bound(
    workload: SimulatedWorkload, settings: ServingSettings, profile: CostProfile, *, from_s: float
) -> float:
    """Return the most requests per second, of those that arrive from `from_s` on, that the nodes could serve well.

    It is the linear program's dual value: nodes serve any share of any request, whenever it suits, without noise; every
    block that an earlier prompt had is reused; decode steps take as long as the TBT objective all the time. Work that a
    run leaves to the time after its last arrival is not counted, so that short runs may exceed it by that.
    """
    seen = {block for _, blocks in workload.before for block in blocks}
    needs = []
    fixed_s = profile.decode_s(0, 0)
    step_costs = (
        fixed_s,
        profile.decode_s(1, 0) - fixed_s,
        (profile.decode_s(1, _MANY) - profile.decode_s(1, 0)) / _MANY,
    )
    for job in workload.jobs:
        hits = next((at for at, block in enumerate(job.blocks) if block not in seen), len(job.blocks))
        seen.update(job.blocks)
        if job.arrival_ns < from_s * NS:
            continue
        reused = min(hits * workload.block_tokens, job.prompt_tokens - 1)
        mean_context = job.prompt_tokens + job.output_tokens / 2
        decode_s = decode_need_s(job.output_tokens - 1, mean_context, step_costs, settings.tbt_objective_s)
        needs.append((profile.prefill_s(job.prompt_tokens - reused, reused), decode_s))
    needs_s, weights = np.array(needs), np.ones(len(needs))
    window_s = workload.duration_s - from_s
    there_s = (settings.prefill_nodes * window_s, settings.decode_nodes * window_s)
    prices = np.zeros(2)
    for _ in range(50):
        prices = np.array(fitting_prices(needs_s, weights, there_s, (float(prices[0]), float(prices[1]))))
    # Any prices give an upper bound; these nearly give the least.
    return float(np.maximum(0.0, 1 - needs_s @ prices).sum() + prices @ there_s) / window_s
