"""The cache's bytes are what the canonical layout says."""

import numpy as np
import pytest
import torch

from engine import CacheMismatch, KvGroupShape, PagedCache

GROUPS = (
    KvGroupShape("full", 0, (0, 2), 2, 4, "float32"),
    KvGroupShape("window", 8, (1, 3, 4), 1, 6, "float32"),
)


def test_offsets_follow_groups_then_slots():
    cache = PagedCache(GROUPS, (3, 5), block_tokens=2)
    assert cache.slot_nbytes(0) == 2 * 2 * 2 * 2 * 4 * 4
    assert cache.slot_nbytes(1) == 3 * 1 * 2 * 2 * 6 * 4
    assert cache.layer_nbytes(1) == cache.slot_nbytes(1) // 3
    assert cache.slot_offset(0, 2) == 2 * cache.slot_nbytes(0)
    assert cache.slot_offset(1, 4) == 3 * cache.slot_nbytes(0) + 4 * cache.slot_nbytes(1)
    assert PagedCache.required_nbytes(GROUPS, (3, 5), 2) == 3 * cache.slot_nbytes(0) + 5 * cache.slot_nbytes(1)


@pytest.mark.parametrize("backend", ["compiled", "torch"])
def test_bytes_at_a_slot_are_layer_head_kv_token_dim(backend, models, runner):
    """Keys and values recomputed densely from the embeddings for layer 0, read back as raw bytes."""
    model = models("qwen2-two-groups", backend=backend)
    run = runner(model, [10], block_tokens=4)
    run.step((0, 0, 7))
    run.step((0, 7, 3))
    keys, values = layer_zero_kv(model, run.sequences[0])
    heads, dim = model.config.num_kv_heads, model.config.head_dim
    raw = run.cache.memory.numpy()
    for position in range(10):
        slot = int(run.tables[0][0][position // 4])
        offset = run.cache.slot_offset(0, slot)
        slot_values = np.frombuffer(raw[offset : offset + run.cache.slot_nbytes(0)].tobytes(), np.float32)
        layer = slot_values.reshape(len(model.kv_groups[0].layers), heads, 2, 4, dim)[0]
        np.testing.assert_allclose(layer[:, 0, position % 4], keys[position], atol=1e-5)
        np.testing.assert_allclose(layer[:, 1, position % 4], values[position], atol=1e-5)


def layer_zero_kv(model, token_ids):
    """Keys and values [n, kv_heads, head_dim] of layer 0 from the checkpoint's formulas."""
    config, w = model.config, model._weights
    x = w.embedding[torch.from_numpy(token_ids.astype(np.int64))].double()
    x = x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * w.attention_norm[0].double()
    qkv = x @ w.qkv[0].double() + w.qkv_bias[0].double()
    k, v = qkv[:, config.q_size :].reshape(len(x), 2, config.num_kv_heads, config.head_dim).unbind(1)
    half = config.head_dim // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) * 2 / config.head_dim)
    turn = torch.polar(torch.ones(()).double(), torch.outer(torch.arange(len(x)).double(), frequency))[:, None]
    turned = torch.complex(k[..., :half], k[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], dim=-1).numpy(), v.numpy()


def test_the_unwritten_tail_of_a_slot_keeps_its_bytes(models, runner):
    run = runner(models("llama"), [5], block_tokens=4)
    run.step((0, 0, 5))
    last = run.cache.views[0][int(run.tables[0][0][1])]
    assert last[:, :, :, 0].isfinite().all()
    assert last[:, :, :, 1:].isnan().all()


def test_kv_moved_between_slots_and_caches_serves_the_same_logits(models, runner):
    """Copy raw slot bytes elsewhere, as a transfer does, and use them through another table."""
    model = models("qwen2-two-groups")
    source, target = runner(model, [22], seed=0), runner(model, [22], seed=5)
    target.sequences = source.sequences
    source.step((0, 0, 21))
    for group in range(2):
        for here, there in zip(source.tables[0][group], target.tables[0][group], strict=True):
            begin, to = source.cache.slot_offset(group, int(here)), target.cache.slot_offset(group, int(there))
            size = source.cache.slot_nbytes(group)
            target.cache.memory[to : to + size] = source.cache.memory[begin : begin + size]
    assert np.array_equal(target.step((0, 21, 1)), source.step((0, 21, 1)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_slots": (1,)}, "one count per group"),
        ({"num_slots": (1, -1)}, "num_slots not negative"),
        ({"num_slots": (1, 1), "block_tokens": 0}, "must be positive"),
        ({"num_slots": (1, 1), "memory": torch.zeros(8, dtype=torch.uint8)}, "must hold"),
        ({"num_slots": (0, 0), "memory": torch.zeros(8)}, "uint8"),
        ({"num_slots": (1, 1), "memory": torch.zeros(10_001, dtype=torch.uint8)[1:]}, "aligned"),
    ],
)
def test_impossible_caches_are_refused(arguments, message):
    with pytest.raises(CacheMismatch, match=message):
        PagedCache(GROUPS, **arguments)


def test_slots_that_do_not_exist_have_no_offset():
    cache = PagedCache(GROUPS, (3, 5), block_tokens=2)
    for slot in (-1, 3):
        with pytest.raises(CacheMismatch, match=r"must be in 0\.\.2"):
            cache.slot_offset(0, slot)
