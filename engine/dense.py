"""The dense reference: computes a whole sequence at once, without cache, pages, chunks or the project's kernels.

It shares only the weights with the serving path, so that each can be verified against the other.
"""

import torch
import torch.nn.functional as F

from engine.config import SILU, ModelConfig
from engine.int8_linear import linear as int8_linear
from engine.int8_rows import rounded
from engine.rolling import RollingWindow
from engine.rope import inverse_frequencies
from engine.rope_config import RopeConfig
from engine.weights import DecoderWeights


def score_dense(
    config: ModelConfig, weights: DecoderWeights, token_ids: torch.Tensor, rolling: RollingWindow | None = None
) -> torch.Tensor:
    """Return the logits of every position, float32 [n, vocab], for token ids int64 [n].

    With `rolling`, each token sees only what the window leaves it.
    """
    n, eps = len(token_ids), config.rms_norm_eps
    exact_from = n if rolling is None else rolling.window
    rotations = [_rotation(rope, config.head_dim, n, exact_from, token_ids.device) for rope in config.ropes]
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    x = weights.embedding[token_ids].to(weights.dtype)
    x = x * torch.tensor(config.embedding_scale, dtype=x.dtype)
    for layer in range(config.num_layers):
        h = _rms_norm(x, weights.attention_norm[layer], eps)
        h = _attention(config, weights, layer, h, rotations[config.layer_ropes[layer]], kept, rolling)
        x = x + (_rms_norm(h, weights.attention_post_norm[layer], eps) if config.post_norms else h)
        h = _rms_norm(x, weights.mlp_norm[layer], eps)
        place = config.mlp_places[layer]
        if layer in config.sparse_layers:
            h = _mix_experts(config, weights, place, h)
        else:
            h = _linear(weights, "down", place, _gated(config, _linear(weights, "gate_up", place, h)))
        x = x + (_rms_norm(h, weights.mlp_post_norm[layer], eps) if config.post_norms else h)
    logits = _rms_norm(x, weights.final_norm, eps) @ weights.head.to(x.dtype).t()
    return _capped(logits.float(), config.logits_softcap)


def _gated(config: ModelConfig, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return up * (F.silu(gate) if config.activation == SILU else F.gelu(gate, approximate="tanh"))


def _mix_experts(config: ModelConfig, weights: DecoderWeights, place: int, h: torch.Tensor) -> torch.Tensor:
    """Return what the experts of one layer make of h [n, d]: the sum, by share, over each token's experts."""
    assert config.experts is not None
    scores = (h @ weights.router[place].to(h.dtype)).float()
    shares, chosen = scores.softmax(dim=-1).topk(config.experts.per_token, dim=-1)
    if config.experts.scaled:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    mixed = torch.zeros_like(h)
    for expert in range(config.experts.count):
        share = (shares * (chosen == expert)).sum(dim=-1, keepdim=True)  # [n, 1]; 0 for tokens that do not use it
        gate_up = _linear(weights, "experts_gate_up", (place, expert), h)
        made = _linear(weights, "experts_down", (place, expert), _gated(config, gate_up))
        mixed = mixed + torch.where(share > 0, (made * share).to(h.dtype), 0)
    return mixed


def _attention(
    config: ModelConfig,
    weights: DecoderWeights,
    layer: int,
    h: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]],
    rolling: RollingWindow | None,
) -> torch.Tensor:
    """Return the attention's output; keys and values of layers that own them are added to ``kept``."""
    n, heads, kv_heads, head_dim = len(h), config.num_heads, config.num_kv_heads, config.head_dim
    qkv = _linear(weights, "qkv", layer, h)
    q, k, v = torch.split(qkv, [config.q_size, config.kv_size, config.kv_size], dim=-1)
    q, k, v = q.view(n, heads, head_dim), k.view(n, kv_heads, head_dim), v.view(n, kv_heads, head_dim)
    if config.qk_norm:
        q = _rms_norm(q, weights.q_norm[layer], config.rms_norm_eps)
        k = _rms_norm(k, weights.k_norm[layer], config.rms_norm_eps)
    owner = config.kv_owners[layer]
    if owner == layer:
        kept[layer] = _stored(config, _rotate(k, *rotation)), _stored(config, v)
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1).transpose(0, 1) for t in kept[owner])
    q = _rotate(q, *rotation).transpose(0, 1)
    sinks = weights.sinks[layer] if config.attention_sinks else None
    if rolling is None:
        mixed = _mix(config, layer, q, k, v, (0, 0), sinks)
    else:
        mixed = _mix_rolling(config, layer, q, k, v, rolling, sinks)
    return _linear(weights, "out", layer, mixed.transpose(0, 1).reshape(n, -1))


def _mix_rolling(
    config: ModelConfig,
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rolling: RollingWindow,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return what `_mix` does, slide by slide."""
    n, begin, parts = q.shape[1], 0, []
    while begin < n:
        start, end = rolling.start(begin), min(n, rolling.end(begin))
        keys, values, kept = k[:, start:end], v[:, start:end], 0
        if start and not config.layer_windows[layer]:
            kept = rolling.sinks
            cos, sin = _turn(config.ropes[config.layer_ropes[layer]], config.head_dim, start - kept, k.device)
            moved = _stored(config, _rotate(k[:, :kept], cos, sin))
            keys, values = torch.cat([moved, keys], dim=1), torch.cat([v[:, :kept], values], dim=1)
        parts.append(_mix(config, layer, q[:, begin:end], keys, values, (begin, start - kept), sinks))
        begin = end
    return torch.cat(parts, dim=1)


def _mix(
    config: ModelConfig,
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    begins: tuple[int, int],
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the mixed values [heads, queries, head_dim] of rotated queries and keys whose positions begin at `begins`.

    `sinks` are learned scores [heads].
    """
    rows, columns = (
        torch.arange(begin, begin + t.shape[1], device=q.device) for begin, t in zip(begins, (q, k), strict=True)
    )
    distance = rows[:, None] - columns[None, :]
    visible = distance >= 0
    if window := config.layer_windows[layer]:
        visible &= distance < window
    if sinks is None and not config.attention_softcap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=config.attention_scale)
    scores = _capped(q.float() @ k.float().transpose(1, 2) * config.attention_scale, config.attention_softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(rows), 1)], dim=-1)
    return scores.softmax(dim=-1)[..., : len(columns)].to(v.dtype) @ v


def _stored(config: ModelConfig, rows: torch.Tensor) -> torch.Tensor:
    """Return keys or values as they are read from the cache."""
    return rounded(rows, config.kv_scale_group) if config.kv_scale_group else rows


def _capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(scores / cap) if cap else scores


def _rotation(
    rope: RopeConfig, head_dim: int, n: int, exact_from: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, float32 [n, 1, head_dim]; angles from position `exact_from` on are in float64."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    positions = torch.arange(n)
    near = torch.outer(positions.float(), frequencies).double()
    exact = torch.outer(positions.double(), frequencies.double())
    angles = torch.where(positions[:, None] < exact_from, near, exact)
    angles = torch.cat([angles, angles], dim=-1)[:, None, :].to(device)
    return angles.cos().float() * factor, angles.sin().float() * factor


def _turn(rope: RopeConfig, head_dim: int, positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what rotates keys by `positions` further."""
    frequencies, _ = inverse_frequencies(rope, head_dim)
    angles = (positions * frequencies.double()).repeat(2).to(device)
    return angles.cos().float(), angles.sin().float()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype) if weight.dtype == x.dtype else (weight * normed).to(x.dtype)


def _linear(weights: DecoderWeights, name: str, place: int | tuple[int, int], x: torch.Tensor) -> torch.Tensor:
    weight, scale, bias = weights.linear(name, place)
    if scale.numel():
        return int8_linear(x, weight, scale, bias)
    weight = weight.to(x.dtype)
    return x @ weight + bias if bias.numel() else x @ weight
