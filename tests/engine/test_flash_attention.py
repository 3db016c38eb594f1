"""The calls of flash-attn: their names and shapes by its signatures, their results by a reference of its documentation.

flash-attn itself needs a GPU; `tests/gpu` compares with it there.
"""

import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine import ForwardBatch, ModelConfig
from engine.backends.flash_attention import PAGE_UNIT, FlashAttention
from engine.backends.gathered_attention import GatheredAttention
from engine.backends.registry import Placement, choose_backend
from engine.batch import flatten_batch
from engine.errors import BackendUnavailable

SIGNATURES = {
    "flash_attn_varlen_func": (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, "
        "causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
        "return_attn_probs=False, block_table=None"
    ),
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False"
    ),
}
"""Of flash-attn 2.8.3."""


def signature(name: str) -> inspect.Signature:
    scope: dict[str, object] = {}
    exec(f"def f({SIGNATURES[name]}): ...", scope)
    return inspect.signature(scope["f"])  # type: ignore[arg-type]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: dict) -> torch.Tensor:
    """Return what flash-attn's documentation says of one sequence: q [n, heads, d], k and v [t, kv_heads, d]."""
    assert given["causal"]
    shared, ahead = q.shape[1] // k.shape[1], len(k) - len(q)
    k, v = (t.repeat_interleave(shared, dim=1).transpose(0, 1) for t in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * given["softmax_scale"]
    if cap := given["softcap"]:
        scores = cap * torch.tanh(scores / cap)
    at, key = torch.arange(q.shape[0])[:, None] + ahead, torch.arange(k.shape[1])
    left, right = given["window_size"]
    visible = (key <= at) & ((left < 0) | (key >= at - left)) & ((right < 0) | (key <= at + right))
    return (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def paged(pages: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    assert pages.stride(-1) == 1, "flash-attn copies a cache whose last dimension is not contiguous"
    assert pages.shape[1] % PAGE_UNIT == 0
    assert table.dtype == torch.int32
    used = table[: -(-length // pages.shape[1])].long()
    return pages[used].flatten(0, 1)[:length]


def flash_attn_with_kvcache(*args, **kwargs):
    given = signature("flash_attn_with_kvcache").bind(*args, **kwargs)
    given.apply_defaults()
    a = given.arguments
    out = [
        attend(q, paged(a["k_cache"], table, int(length)), paged(a["v_cache"], table, int(length)), a)
        for q, table, length in zip(a["q"], a["block_table"], a["cache_seqlens"], strict=True)
    ]
    return torch.stack(out)


def flash_attn_varlen_func(*args, **kwargs):
    given = signature("flash_attn_varlen_func").bind(*args, **kwargs)
    given.apply_defaults()
    a, out = given.arguments, []
    lengths = a["cu_seqlens_k"].diff().tolist()
    for table, first, last, length in zip(
        a["block_table"], a["cu_seqlens_q"][:-1], a["cu_seqlens_q"][1:], lengths, strict=True
    ):
        assert last - first <= a["max_seqlen_q"]
        assert length <= a["max_seqlen_k"]
        out.append(attend(a["q"][first:last], paged(a["k"], table, length), paged(a["v"], table, length), a))
    return torch.cat(out)


LIBRARY = SimpleNamespace(
    flash_attn_with_kvcache=flash_attn_with_kvcache, flash_attn_varlen_func=flash_attn_varlen_func
)


@pytest.mark.parametrize("family", ["llama", "qwen2-two-groups", "gemma2"])
def test_calls_compute_what_torch_does(family, models, runner):
    model = models(family, backend="torch")
    lengths = [300, 20, 1, 530]
    run = runner(model, lengths, PAGE_UNIT)
    for sequence, length in enumerate(lengths):
        run.step((sequence, 0, length))
    # what is not there yet is NaN, and must not be read; the reference would multiply it by 0
    run.cache.flat[run.cache.flat.isnan()] = 0
    chunks = [run.chunk(0, 299, 1), run.chunk(1, 5, 15), run.chunk(2, 0, 1), run.chunk(3, 500, 30)]
    plan = flatten_batch(ForwardBatch(chunks), model.config, run.cache)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(len(plan.token_ids), model.config.num_heads, model.config.head_dim, generator=generator)
    ours = FlashAttention(model.config, model._weights, LIBRARY).begin(plan, run.cache)
    want = GatheredAttention(model.config, model._weights).begin(plan, run.cache)
    for layer in range(model.config.num_layers):
        assert float((ours.run(layer, q) - want.run(layer, q)).abs().max()) < 1e-5


def placement(config: ModelConfig, block_tokens: int = 256, dtype: torch.dtype = torch.bfloat16) -> Placement:
    return Placement(config, torch.device("cuda", 0), dtype, block_tokens)


def test_what_flash_attn_cannot_do_is_named(models, monkeypatch):
    monkeypatch.setattr("engine.backends.registry.find_spec", lambda name: object())
    config = models("llama").config
    assert choose_backend("flash-attn", placement(config)).name == "flash-attn"
    assert choose_backend("auto", placement(config)).name == "torch"
    for refused, why in (
        (placement(config, block_tokens=16), "reads pages of a multiple of 256 tokens: block-tokens is 16"),
        (placement(config, dtype=torch.float32), "computes in float16 or bfloat16, not in float32"),
        (placement(replace(config, attention_sinks=True)), "does not compute learned sinks"),
        (placement(replace(config, kv_scale_group=8)), "does not read KV in int8"),
        (placement(replace(config, head_dim=512)), ".* up to 256 dimensions, the model's have 512"),
        (placement(replace(config, head_dim=20)), ".* a multiple of 8 .*, the model's have 20"),
    ):
        with pytest.raises(BackendUnavailable, match=f"engine-backend flash-attn {why}.*; use auto or triton or torch"):
            choose_backend("flash-attn", refused)
    monkeypatch.setattr("engine.backends.registry.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match="flash-attn, which is not installed"):
        choose_backend("flash-attn", placement(config))
    assert choose_backend("auto", placement(config)).name == "torch"
