"""Simulated cluster of the benchmarks of scheduling options: Mooncake's 70B cost profile, unscaled trace."""

import argparse

from settings.conductor import AdmissionMode
from simulator.serving.overload_spec import OverloadScenario, overload_spec
from simulator.serving.runs import RunSpec, with_mode
from worker.policy.cost_profile import MOONCAKE


def simulated_spec(given: argparse.Namespace, mode: AdmissionMode) -> RunSpec:
    """Return the run described by the benchmark's command line, under admission mode `mode`."""
    spec = overload_spec(
        OverloadScenario(
            given.trace,
            MOONCAKE,
            prefill_nodes=given.prefill,
            decode_nodes=given.decode,
            ttft_s=given.ttft,
            tbt_s=given.tbt,
            requests=given.requests,
            output_scale=1.0,
            longest_prompt=0,
            longest_answer=0,
            pool_blocks=6000,
            ssd_blocks=0,
            look_into=0.0,
            attained_share=0.95,
        )
    )
    return with_mode(spec, mode)
