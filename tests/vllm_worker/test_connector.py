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
from vllm_worker.connector import MoonpoolConnector, cpu_positions
from vllm_worker.kv_jobs import BlocksToCopy, KvJob


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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_requests_without_a_job_are_left_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MoonpoolConnector.__bases__[0], "__init__", lambda *_: None)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=32), device_config=SimpleNamespace(device_type=device)
    )
    connector = MoonpoolConnector(config, None, None)  # type: ignore[arg-type]
    for params in (None, {"of": "another connector"}):
        assert connector.get_num_new_matched_tokens(request(params), 0) == (0, False)
        assert connector.request_finished(request(params), [1, 2]) == (False, None)
    job = KvJob(number=1, slots=(4, 5), load_tokens=33, save_from=33, saves_layers=False)
    assert connector.get_num_new_matched_tokens(request(job.to_params()), 32) == (1, device == "cuda")
    assert connector.get_num_new_matched_tokens(request(job.to_params()), 33) == (0, False)
    assert connector.request_finished(request(job.to_params()), [1, 2]) == (True, None)
