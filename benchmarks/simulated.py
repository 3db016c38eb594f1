"""Simulated cluster of the benchmarks of scheduling options: Mooncake's 70B cost profile."""

import argparse

from settings.conductor import AdmissionMode
from simulator.serving.overload_spec import OverloadScenario, overload_spec
from simulator.serving.runs import RunSpec, with_mode
from worker.policy.cost_profile import MOONCAKE


def simulated_spec(
    given: argparse.Namespace, mode: AdmissionMode, *, output_scale: float = 1.0, longest_answer: int = 0
) -> RunSpec:
    """Return the run described by the benchmark's command line, under admission mode `mode`.

    The trace's answers are scaled by `output_scale`; clients allow `longest_answer` tokens (0: the trace's longest).
    """
    spec = overload_spec(
        OverloadScenario(
            given.trace,
            MOONCAKE,
            prefill_nodes=given.prefill,
            decode_nodes=given.decode,
            ttft_s=given.ttft,
            tbt_s=given.tbt,
            requests=given.requests,
            output_scale=output_scale,
            longest_prompt=0,
            longest_answer=longest_answer,
            pool_blocks=6000,
            ssd_blocks=0,
            look_into=0.0,
            attained_share=0.95,
        )
    )
    return with_mode(spec, mode)
