"""The connector inside vLLM: what its CPU kernels write, read in the order of slots, and what it leaves alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_worker.block_copies import new_block_copies
from vllm_worker.block_layout import SlotLayout
from vllm_worker.connector import MoonpoolConnector, StepStats, cpu_positions
from vllm_worker.engine_args import COPIES_SOCKET
from vllm_worker.kv_jobs import BlocksToCopy, KvJob
from vllm_worker.step_work import STEPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_keys_and_values_that_vllms_kernels_write_are_read_token_by_token(dtype: torch.dtype, head_dim: int) -> None:
    heads, tokens = 2, 32
    layer = SimpleNamespace(isa=_get_attn_isa(dtype, tokens, head_dim))
    cache = torch.zeros((3, heads, tokens, 2 * head_dim), dtype=dtype)
    positions = cpu_positions(cache, layer)
    keys, values = torch.randn((2, tokens + 7, heads, head_dim)).to(dtype)
    parts = cache.view(3, heads, 2 * tokens, head_dim).chunk(2, dim=2)
    where = torch.tensor([2 * tokens + i for i in range(tokens)] + list(range(7)))  # block 2, then a part of block 0
    ops.cpu_attn_reshape_and_cache(keys, values, *parts, where, layer.isa)

    layout = SlotLayout(2, 1, heads, tokens, head_dim, dtype.itemsize)
    memory = np.zeros(layout.nbytes, np.uint8)
    copies = new_block_copies(memory, layout, [cache], range(heads), positions)
    copies.save(BlocksToCopy(1, "r", [(2, 0), (0, 1)]), lambda *_: None)
    copies.close()
    slots = torch.from_numpy(memory).view(dtype).view(layout.shape)[:, 0]
    assert torch.equal(slots[0, :, 0], keys[:tokens].transpose(0, 1))
    assert torch.equal(slots[0, :, 1], values[:tokens].transpose(0, 1))
    assert torch.equal(slots[1, :, 0, :7], keys[tokens:].transpose(0, 1))
    assert not slots[1, :, :, 7:].any()


def request(params: dict[str, Any] | None) -> Any:
    return SimpleNamespace(request_id="r", kv_transfer_params=params, num_prompt_tokens=40)


def made(device: str, monkeypatch: pytest.MonkeyPatch) -> MoonpoolConnector:
    """A scheduler's connector for blocks of 32 tokens."""
    monkeypatch.setattr(MoonpoolConnector.__bases__[0], "__init__", lambda *_: None)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=32),
        device_config=SimpleNamespace(device_type=device),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={COPIES_SOCKET: "/nowhere"}),
    )
    return MoonpoolConnector(config, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_requests_without_a_job_are_left_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = made(device, monkeypatch)
    for params in (None, {"of": "another connector"}):
        assert connector.get_num_new_matched_tokens(request(params), 0) == (0, False)
        assert connector.request_finished(request(params), [1, 2]) == (False, None)
    job = KvJob(number=1, slots=(4, 5), load_tokens=33, save_from=33, saves_layers=False)
    assert connector.get_num_new_matched_tokens(request(job.to_params()), 32) == (1, device == "cuda")
    assert connector.get_num_new_matched_tokens(request(job.to_params()), 33) == (0, False)
    assert connector.request_finished(request(job.to_params()), [1, 2]) == (True, None)


def test_layers_of_a_prompt_are_saved_from_the_blocks_that_its_steps_named(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = made("cpu", monkeypatch)
    job = KvJob(number=1, slots=(4, 5), load_tokens=0, save_from=0, saves_layers=True)
    connector.get_num_new_matched_tokens(request(job.to_params()), 0)

    def layers(num_tokens: int, **scheduled: Any) -> list[Any]:
        new, cached = scheduled.get("new", []), scheduled.get("cached", SimpleNamespace(req_ids=[], resumed_req_ids=()))
        for name in ("num_computed_tokens", "new_block_ids"):
            cached.__dict__.setdefault(name, [])
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={"r": num_tokens, "another": 1},
            preempted_req_ids=None,
        )
        return [(copy.start, copy.end, copy.pairs) for copy in connector.build_connector_meta(output).copies.layers]

    def first(request_id: str, block: int) -> Any:
        return SimpleNamespace(req_id=request_id, num_computed_tokens=0, block_ids=([block],))

    def later(num_computed: int, blocks: list[int] | None, *resumed: str) -> Any:
        new = None if blocks is None else (blocks,)
        return SimpleNamespace(
            req_ids=["r"], resumed_req_ids=set(resumed), num_computed_tokens=[num_computed], new_block_ids=[new]
        )

    assert layers(20, new=[first("r", 7), first("another", 9)]) == []  # no block is complete
    assert layers(12, cached=later(20, None)) == [(0, 32, [(7, 4)])]
    assert layers(8, cached=later(32, [3])) == [(32, 40, [(3, 5)])]
    assert layers(40, cached=later(0, [1, 2], "r")) == []  # computed again after a preemption, but saved already
    with pytest.raises(RuntimeError, match="65 tokens of r in 2 known blocks"):
        layers(1, cached=later(64, None))


def test_the_scheduler_reports_what_each_step_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = made("cpu", monkeypatch)
    for number, name in enumerate(("a", "b")):
        asked = request(KvJob(number, (4, 5), load_tokens=0, save_from=0, saves_layers=False).to_params())
        asked.request_id = name
        connector.get_num_new_matched_tokens(asked, 0)

    def schedule(*steps: tuple[str, int, int]) -> None:
        cached = SimpleNamespace(
            req_ids=[name for name, _, _ in steps],
            resumed_req_ids=set(),
            num_computed_tokens=[computed for _, computed, _ in steps],
            new_block_ids=[None for _ in steps],
        )
        counts = {name: count for name, _, count in steps}
        output = SimpleNamespace(
            scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens=counts, preempted_req_ids=None
        )
        connector.build_connector_meta(output)

    def reported() -> Any:
        stats = connector.get_kv_connector_stats()
        return stats and [step[1:] for step in stats.data[STEPS]]

    schedule(("a", 0, 40), ("b", 0, 24), ("of no job", 0, 9))
    schedule(("a", 40, 1), ("b", 24, 16))
    schedule(("a", 41, 1), ("b", 40, 1))
    schedule()
    assert reported() == [[[(0, 40), (1, 24)], 0, 0]]
    assert reported() == [[[(1, 16)], 1, 40]]
    assert reported() == [[[], 2, 81]]
    assert reported() is None  # nothing was computed
    assert connector.get_kv_connector_stats() is None

    logged = StepStats({STEPS: [[0.25, [], 1, 5]]}).aggregate(StepStats({STEPS: [[0.75, [], 1, 5]]}))
    assert logged.reduce() == {"Steps": 2, "Avg step time (ms)": 500.0}
    assert MoonpoolConnector.build_kv_connector_stats().is_empty()
