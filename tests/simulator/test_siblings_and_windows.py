"""Simulated clusters whose requests slide, and those that reuse a sibling's KV: what both take and save."""

from dataclasses import replace
from typing import Any

import pytest

from conductor.policy import PolicyConfig
from simulator.errors import BadSetting
from simulator.serving.clock import NS
from simulator.serving.cluster import SimulatedCluster
from simulator.serving.overload_spec import OverloadScenario, overload_spec
from simulator.serving.requests import Arrival, RequestEnd, SimulatedWorkload
from simulator.serving.settings import ServingSettings
from simulator.serving.siblings import SiblingReuse
from worker.policy.cost_profile import MOONCAKE, load_profile
from worker.policy.reuse_profile import ReuseAccuracy, ReusePoint, ReuseProfile

BLOCK = 512
PROFILE = load_profile(MOONCAKE)
POLICY = PolicyConfig(attained_share=0.0, report_timeout_s=0.0, max_queue_s=1e6, admission_mode="none")
QUIET = ServingSettings(
    prefill_nodes=2, decode_nodes=1, max_new_tokens=4096, request_noise=0.0, step_noise=0.0, node_noise=0.0
)
REUSE = ReuseProfile(
    sender="base",
    sender_fingerprint="0" * 32,
    receiver="tuned",
    receiver_fingerprint="1" * 32,
    tokenizer="test",
    dtype="float16",
    num_layers=80,
    hidden_size=8192,
    made="2026-01-01",
    data_sha256="0" * 64,
    contexts=1,
    questions=1,
    context_tokens=1000.0,
    accuracy=ReuseAccuracy(0.1, 0.9, 0.4),
    max_quality_loss=0.05,
    points=(ReusePoint(20, 30, 0.13, 0.88, 0.03, (0.0, 0.05)), ReusePoint(10, 40, 0.38, 0.89, 0.01, (0.0, 0.03))),
)


def workload(prompts: list[int], answer: int, *, apart_s: float = 100.0) -> SimulatedWorkload:
    """Conversations of one request each, without common blocks."""
    jobs = tuple(
        Arrival(
            index=i,
            arrival_ns=round(i * apart_s * NS),
            conversation=i,
            prompt_tokens=tokens,
            output_tokens=answer,
            blocks=tuple(range(1000 * i, 1000 * i + tokens // BLOCK)),
            luck=0.0,
            is_sampled=1.0,
        )
        for i, tokens in enumerate(prompts)
    )
    return SimulatedWorkload(jobs, (), BLOCK, 1.0, len(prompts) * apart_s)


def run(settings: ServingSettings, work: SimulatedWorkload) -> SimulatedCluster:
    cluster = SimulatedCluster(settings, POLICY, PROFILE, work, seed=1)
    cluster.run()
    assert all(each.end is RequestEnd.FINISHED for each in cluster.works)
    assert cluster.pools.validate(settings) == []
    assert all(node.free_tokens == settings.capacity_tokens for node in cluster.decode.values())
    return cluster


def test_tokens_of_a_request_that_slides_become_no_slower() -> None:
    work = workload([1024], 4096)
    plain, slides = (run(replace(QUIET, window_tokens=tokens), work).works[0] for tokens in (0, 2048))

    def first_and_last(request: Any) -> tuple[int, int]:
        return request.intervals[1][0], request.intervals[-1][0]

    first, last = first_and_last(slides)
    full_s = PROFILE.decode_s(1, 2048)
    assert first < last == round(full_s * NS)
    assert first_and_last(plain)[0] == first
    assert first_and_last(plain)[1] > last


def test_a_request_that_slides_holds_no_more_than_its_window() -> None:
    work = workload([8192] * 8, 256, apart_s=0.001)
    settings = replace(QUIET, capacity_tokens=16_384, max_new_tokens=256, ttft_objective_s=1e6)
    waits = [
        max(each.sent_ns - each.job.arrival_ns for each in run(replace(settings, window_tokens=tokens), work).works)
        for tokens in (0, 2048)
    ]
    assert waits[1] < 0.7 * waits[0]  # without a window, one request at a time has room


def test_a_prompt_longer_than_the_window_costs_what_its_tokens_see_and_is_stored_as_far_as_nothing_slid() -> None:
    window, prompt = 4096, 32_768
    work = workload([prompt], 2)
    cluster = run(replace(QUIET, window_tokens=window), work)
    began = PROFILE.prefill_s(window) + (prompt - window) * (
        PROFILE.prefill.per_token_s + PROFILE.prefill.per_pair_s * window
    )
    assert cluster.works[0].prefill_s == pytest.approx(began, rel=0.15)  # each chunk has fixed costs
    assert cluster.works[0].prefill_s < 0.8 * PROFILE.prefill_s(prompt)
    held = max(cluster.pools.held(pool, work.jobs[0].blocks)[0] for pool in cluster.pools.roster)
    assert held == window // BLOCK


def test_a_siblings_kv_shortens_the_prefill_to_its_share_and_is_not_stored() -> None:
    work = workload([16_384 + 100] * 2, 2)
    alone, reuses = (
        run(replace(QUIET, siblings=siblings), work) for siblings in (None, SiblingReuse(REUSE, share=1.0))
    )
    for before, after in zip(alone.works, reuses.works, strict=True):
        assert (before.sibling_tokens, after.sibling_tokens) == (0, 16_384)
        assert after.sibling is not None
        assert after.sibling.quality_loss == 0.01  # the best one that is in time
        rest_s = PROFILE.prefill_s(100, 16_384)
        assert after.prefill_s == pytest.approx(0.38 * PROFILE.prefill_s(16_384) + rest_s, rel=0.1)
        assert after.ttft_s < 0.6 * before.ttft_s
        assert after.computed_tokens == 100
        assert max(reuses.pools.held(pool, after.job.blocks)[0] for pool in reuses.pools.roster) == 0
        assert max(alone.pools.held(pool, before.job.blocks)[0] for pool in alone.pools.roster) == 32


def test_the_conductor_learns_how_long_reuse_takes() -> None:
    work = workload([16_384 + 100] * 30, 2)
    cluster = run(replace(QUIET, siblings=SiblingReuse(REUSE, share=0.5)), work)
    reusing = [each for each in cluster.works if each.sibling_tokens]
    assert {each.sibling.pool for each in reusing if each.sibling is not None} == set(cluster.pools.roster)
    assert reusing[-1].ttft_s == pytest.approx(reusing[-1].predicted_ttft_s, rel=0.1)


def test_only_the_share_of_conversations_has_a_sibling() -> None:
    work = workload([4096] * 60, 2)
    cluster = run(replace(QUIET, siblings=SiblingReuse(REUSE, share=0.5)), work)
    assert 18 < sum(bool(each.sibling_tokens) for each in cluster.works) < 42


def test_what_a_choice_reads_is_the_other_layers_and_the_states_that_enter_the_first() -> None:
    cluster = run(replace(QUIET, siblings=SiblingReuse(REUSE, share=1.0)), workload([4096], 2))
    choice, siblings = cluster.works[0].sibling, cluster.settings.siblings
    assert choice is not None
    assert siblings is not None
    assert siblings.read_nbytes(choice, 10, 8000) == 8000 * (80 - 31) // 80 + 10 * 8192 * 2
    assert siblings.read_nbytes(replace(choice, first_layer=0, last_layer=30), 10, 8000) == 8000 * (80 - 31) // 80


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sibling_share": 0.5}, "--sibling-share needs --reuse-profile"),
        ({"window_tokens": 600}, "--endless-window must be 0 or at least 1024"),
    ],
)
def test_bad_options_are_named(changed: dict[str, Any], message: str) -> None:
    scenario = OverloadScenario(
        "conversation",
        MOONCAKE,
        prefill_nodes=1,
        decode_nodes=1,
        ttft_s=30.0,
        tbt_s=0.1,
        requests=10,
        output_scale=1.0,
        longest_prompt=0,
        longest_answer=0,
        pool_blocks=100,
        ssd_blocks=0,
        look_into=0.0,
        attained_share=0.95,
    )
    with pytest.raises(BadSetting, match=message):
        overload_spec(replace(scenario, **changed))


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(BadSetting, match="from 0 to 1"):
        SiblingReuse(REUSE, share=1.5)
    with pytest.raises(BadSetting, match="aggregated"):
        replace(QUIET, is_aggregated=True, siblings=SiblingReuse(REUSE, share=0.5))
    with pytest.raises(BadSetting, match="window_tokens"):
        replace(QUIET, window_tokens=-1)
