"""Simulated pools of models with windows: what windows take of the room, and where a prefix can end."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from conductor.policy import PolicyConfig
from kvpool.policy.eviction import RetainRequest
from simulator.serving.cluster import SimulatedCluster
from simulator.serving.hot_prefixes import HotPrefixes, draw_hot_workload
from simulator.serving.pools import BlockSizes, SimulatedPools
from simulator.serving.settings import ServingSettings
from worker.policy.cost_profile import MOONCAKE, load_profile

SETTINGS = ServingSettings(pool_blocks=20)
SIZES = BlockSizes(lasting=1, windowed=3, window_blocks=2)


def held(pools: SimulatedPools, *blocks: int) -> int:
    return pools.held("a", blocks)[0]


def test_a_prefix_can_be_reused_up_to_the_end_of_a_prompt_and_from_the_second_time_on_up_to_a_fork() -> None:
    pools = SimulatedPools(replace(SETTINGS, pool_blocks=100), ["a"], SIZES)
    pools.store("a", 0, (1, 2, 3, 4, 5, 6))
    assert held(pools, 1, 2, 3, 4, 5, 6, 7) == 6
    assert held(pools, 1, 2, 3, 4, 9) == 0
    pools.store("a", 1, (1, 2, 3, 4, 9))
    assert held(pools, 1, 2, 3, 4, 10) == 4
    assert held(pools, 1, 2, 3, 4, 9, 10) == 5


def test_windows_take_room_and_prompts_leave_whole() -> None:
    prompts = [tuple(range(10 * i, 10 * i + 4)) for i in range(1, 6)]
    plain, windowed = SimulatedPools(SETTINGS, ["a"]), SimulatedPools(SETTINGS, ["a"], SIZES)
    for at, blocks in enumerate(prompts):
        for pools in (plain, windowed):
            pools.store("a", at, blocks)
            assert pools.validate(SETTINGS) == []
    assert [held(plain, *blocks) for blocks in prompts] == [4, 4, 4, 4, 4]
    assert [held(windowed, *blocks) for blocks in prompts] == [0, 0, 0, 4, 4]


def test_without_other_layers_only_windows_take_room() -> None:
    sizes = BlockSizes.of(replace(load_profile(MOONCAKE), kv_bytes_per_token=0, window_bytes_per_token=9), 512)
    assert (sizes.lasting, sizes.windowed) == (0, 1)
    pools = SimulatedPools(SETTINGS, ["a"], replace(sizes, window_blocks=2))
    prompts = [tuple(range(100 * i, 100 * i + 50)) for i in range(1, 12)]
    for at, blocks in enumerate(prompts):
        pools.store("a", at, blocks)
        assert pools.validate(SETTINGS) == []
    assert [held(pools, *blocks) for blocks in prompts] == [0] + [50] * 10


def test_what_is_used_stays() -> None:
    pools = SimulatedPools(SETTINGS, ["a"], SIZES)
    pools.store("a", 0, (1, 2, 3, 4))
    pools.store("a", 1, (11, 12, 13, 14))
    pools.use("a", 2, (1, 2, 3, 4))
    pools.store("a", 3, (21, 22, 23, 24))
    assert (held(pools, 1, 2, 3, 4), held(pools, 11, 12, 13, 14)) == (4, 0)


def test_windows_are_found_on_ssd() -> None:
    pools = SimulatedPools(replace(SETTINGS, pool_blocks=10, ssd_blocks=100), ["a"], SIZES)
    pools.store("a", 0, (1, 2, 3, 4))
    pools.store("a", 1, (11, 12, 13, 14))
    assert pools.held("a", (1, 2, 3, 4)) == (4, 4)
    assert pools.held("a", (11, 12, 13, 14)) == (4, 0)


def test_a_retained_prefix_keeps_its_window_while_a_request_waits_for_it() -> None:
    pools = SimulatedPools(replace(SETTINGS, retained_share=1.0, retained_tenant_share=1.0), ["a"], SIZES)
    assert pools.retain("a", 0, (1, 2, 3, 4), RetainRequest("tenant", 10))
    pools.store("a", 0, (1, 2, 3, 4))

    def store_others(times: range) -> int:
        for at in times:
            pools.store("a", at, tuple(range(10 * at, 10 * at + 4)))
        return held(pools, 1, 2, 3, 4)

    assert store_others(range(2, 9)) == 4
    pools.await_use("a", 9, (1, 2, 3, 4, 5, 6, 7, 8))
    assert store_others(range(11, 19)) == 4
    assert store_others(range(20, 23)) == 0


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 9)), max_size=30),
    st.integers(8, 60),
    st.integers(1, 4),
)
def test_a_reused_prefix_has_all_its_blocks_and_its_window(
    prompts: list[tuple[int, int, int]], room: int, window_blocks: int
) -> None:
    settings = replace(SETTINGS, pool_blocks=room)
    pools = SimulatedPools(settings, ["a"], replace(SIZES, window_blocks=window_blocks))
    for at, (family, branch, length) in enumerate(prompts):
        blocks = [100 * family + i + (10 * branch if i >= 2 else 0) for i in range(length)]
        present = pools._memory["a"].present
        count = held(pools, *blocks)
        assert all(block in present for block in blocks[:count])
        assert all(~block in present for block in blocks[max(0, count - window_blocks) : count])
        longer = range(count + 1, length + 1)
        assert not any(
            all(block in present for block in blocks[:end])
            and all(~block in present for block in blocks[max(0, end - window_blocks) : end])
            for end in longer
        )
        pools.store("a", at, blocks)
        assert pools.validate(settings) == []


def test_a_cluster_of_a_model_with_windows_reuses_less_of_a_pool_with_the_same_room() -> None:
    profile = load_profile(MOONCAKE)
    windowed = replace(profile, window_tokens=2048, window_bytes_per_token=5 * profile.kv_bytes_per_token)
    sizes = [BlockSizes.of(each, 512) for each in (profile, windowed)]
    assert sizes == [BlockSizes(1, 0, 0), BlockSizes(1, 5, 4)]
    hot = HotPrefixes(num_prefixes=12, prefix_tokens=16384, answer_tokens=8, skew=1.5)
    workload = draw_hot_workload(hot, seed=1, rate_per_s=10.0, requests=150, block_tokens=512)
    settings = ServingSettings(prefill_nodes=2, decode_nodes=2, max_new_tokens=64, pool_blocks=300)
    policy = PolicyConfig(attained_share=0.0, report_timeout_s=0.0, max_queue_s=1e6, admission_mode="none")
    reused = []
    for each in (profile, windowed):
        cluster = SimulatedCluster(settings, policy, each, workload, seed=1)
        cluster.run()
        assert cluster.pools.validate(settings) == []
        reused.append(sum(work.reused_tokens for work in cluster.works))
    assert 0 < reused[1] < 0.9 * reused[0]
