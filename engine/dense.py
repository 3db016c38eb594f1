"""The dense reference: computes a whole sequence at once, without cache, pages, chunks or the project's kernels.

It shares only the weights with the serving path, so that each can be verified against the other.
"""

import torch
import torch.nn.functional as F

from engine.config import ModelConfig
from engine.rope import inverse_frequencies
from engine.weights import DecoderWeights


def score_dense(config: ModelConfig, weights: DecoderWeights, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of every position, float32 [n, vocab], for token ids int64 [n]."""
    n = len(token_ids)
    cos, sin = _rotation(config, n, token_ids.device)
    x = weights.embedding[token_ids]
    for layer in range(config.num_layers):
        h = _rms_norm(x, weights.attention_norm[layer], config.rms_norm_eps)
        x = x + _attention(config, weights, layer, h, cos, sin)
        h = _rms_norm(x, weights.mlp_norm[layer], config.rms_norm_eps)
        gate, up = _linear(h, weights.gate_up[layer], weights.gate_up_bias[layer]).chunk(2, dim=-1)
        x = x + _linear(F.silu(gate) * up, weights.down[layer], weights.down_bias[layer])
    return (_rms_norm(x, weights.final_norm, config.rms_norm_eps) @ weights.head.t()).float()


def _attention(
    config: ModelConfig, weights: DecoderWeights, layer: int, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    n, heads, kv_heads, head_dim = len(h), config.num_heads, config.num_kv_heads, config.head_dim
    qkv = _linear(h, weights.qkv[layer], weights.qkv_bias[layer])
    q, k, v = torch.split(qkv, [config.q_size, config.kv_size, config.kv_size], dim=-1)
    q, k, v = q.view(n, heads, head_dim), k.view(n, kv_heads, head_dim), v.view(n, kv_heads, head_dim)
    if config.qk_norm:
        q = _rms_norm(q, weights.q_norm[layer], config.rms_norm_eps)
        k = _rms_norm(k, weights.k_norm[layer], config.rms_norm_eps)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    positions = torch.arange(n, device=h.device)
    distance = positions[:, None] - positions[None, :]
    visible = distance >= 0
    if window := config.layer_windows[layer]:
        visible &= distance < window
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    return _linear(mixed.transpose(0, 1).reshape(n, -1), weights.out[layer], weights.out_bias[layer])


def _rotation(config: ModelConfig, n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies, factor = inverse_frequencies(config.rope, config.head_dim)
    angles = torch.outer(torch.arange(n, dtype=torch.float32), frequencies)
    angles = torch.cat([angles, angles], dim=-1)[:, None, :].to(device)
    return angles.cos() * factor, angles.sin() * factor


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x @ weight + bias if bias.numel() else x @ weight
