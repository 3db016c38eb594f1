"""Every layout in which vLLM's own code allocates KV for a GPU, read in the order of slots or refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.b12x import B12xPagedAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, KVQuantMode
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from tests.vllm_worker.vllm_blocks import VllmBlocks, random_values
from vllm_worker.block_layout import LayoutMismatch, SlotLayout, in_slot_order, require_plain_blocks

LAYOUT = SlotLayout(num_slots=1, num_layers=3, kv_heads=2, block_tokens=32, head_dim=8, value_nbytes=2)
NAMES = [f"model.layers.{i}.self_attn.attn" for i in range(LAYOUT.num_layers)]
NUM_BLOCKS = 5


def plain_spec(**fields: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=LAYOUT.block_tokens,
        num_kv_heads=LAYOUT.kv_heads,
        head_size=LAYOUT.head_dim,
        dtype=torch.bfloat16,
        **fields,
    )


def allocate(layout: KVCacheLayout, kernel_tokens: int) -> list[torch.Tensor]:
    """Return the tensors that vLLM registers with a connector."""
    group = KVCacheGroupSpec(NAMES, plain_spec())
    config: Any = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=NUM_BLOCKS,
            prefix_cache_retention_interval=None,
        ),
    )
    found = get_kv_cache_config_from_groups(config, [group], 1 << 24)
    require_plain_blocks(found.kv_cache_groups)
    caches = allocate_kv_cache(found, torch.device("cpu"), layout, [kernel_tokens])
    return [caches[name] for name in NAMES]


@pytest.mark.parametrize("kernel_tokens", [32, 16])
@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
def test_blocks_are_read_and_written_in_the_order_of_slots(layout: KVCacheLayout, kernel_tokens: int) -> None:
    if kernel_tokens < 32 and layout not in (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC):
        with pytest.raises(ValueError, match="cannot be split"):
            allocate(layout, kernel_tokens)
        return
    layers = allocate(layout, kernel_tokens)
    blocks = VllmBlocks(LAYOUT, LAYOUT.kv_heads, LAYOUT.block_tokens // kernel_tokens, layers)
    shape = (LAYOUT.kv_heads, 2, LAYOUT.block_tokens, LAYOUT.head_dim)
    written = {}
    for layer in range(LAYOUT.num_layers):
        for block in range(NUM_BLOCKS):
            written[layer, block] = random_values(shape, torch.int16, seed=layer * NUM_BLOCKS + block)
            blocks.write(layer, block, written[layer, block].view(torch.bfloat16))
    views = [in_slot_order(layer, LAYOUT, LAYOUT.kv_heads) for layer in layers]
    for (layer, block), values in written.items():
        found = views[layer][block].contiguous().view(torch.int16)
        assert torch.equal(found.reshape(shape), values)


@pytest.mark.parametrize(
    ("backend", "fields"),
    [
        (B12xPagedAttentionBackend, {}),
        (TritonAttentionBackend, {"kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD}),
    ],
)
def test_backends_that_pack_blocks_in_an_order_of_their_own_are_refused(backend: Any, fields: dict[str, Any]) -> None:
    spec = backend.customize_spec(plain_spec(**fields))
    with pytest.raises(LayoutMismatch, match="packs a block"):
        require_plain_blocks([KVCacheGroupSpec(NAMES, spec)])


@pytest.mark.parametrize("backend", [FlashAttentionBackend, FlexAttentionBackend, TritonAttentionBackend])
def test_other_backends_keep_plain_blocks(backend: Any) -> None:
    require_plain_blocks([KVCacheGroupSpec(NAMES, backend.customize_spec(plain_spec()))])
