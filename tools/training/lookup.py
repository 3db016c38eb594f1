"""An initialisation that can already look things up, in the manner of mimetic initialisation (Trockman & Kolter, 2023).

A model this small meets too few tokens in a short run for induction heads (Olsson et al., 2022) to form by chance, so
their circuit is written into the starting weights and training is left to refine it:

- one component of every embedding is the same constant, which lets a head attend by position alone; the final norm
  hides it from the (tied) output, whose gradient would otherwise turn it into the unigram bias;
- layer 0: head 0 attends one token back, head 2 two tokens back; each writes a projection of the token it sees into
  its own part of the residual stream (``ONE_BACK``, ``TWO_BACK``);
- layers 1 and 2: head 0 matches the current token with the keys' one-back part, head 2 the one-back part with the
  keys' two-back part; both copy the matched token towards the output.
"""

import torch
from torch import Tensor

from tools.training.errors import UnsuitableShape
from tools.training.model import EMBEDDING_DEVIATION, Attention, Llama

CONSTANT = 6.0
BACK_GAIN = 1.0
WRITE_GAIN = 2.5
MATCH_GAIN = 2.3
COPY_GAIN = 16.0
MATCH_LAYERS = (1, 2)
SLOW_PAIRS_FROM = 7
"""Rotary pairs from this one on turn by less than a radian over most of a window, so content can be matched in them."""


@torch.no_grad()
def write_lookup(model: Llama, seed: int) -> None:
    """Overwrite parts of an initialised model's embedding and of the attention of layers 0, 1 and 2.

    Raises UnsuitableShape when the model has fewer than three layers or two key/value heads, or when its residual
    stream cannot hold both written parts beside the constant.
    """
    shape, generator = model.shape, torch.Generator().manual_seed(seed)
    if shape.layers <= max(MATCH_LAYERS) or shape.kv_heads < 2 or 2 * shape.head_dim >= shape.hidden:
        raise UnsuitableShape(
            f"the circuit needs {max(MATCH_LAYERS) + 1} layers, 2 key/value heads and a hidden size above "
            f"{2 * shape.head_dim}, not {shape.layers}, {shape.kv_heads} and {shape.hidden}"
        )
    size, slow = shape.head_dim, SLOW_PAIRS_FROM * shape.head_dim // 32
    model.model.embed_tokens.weight[:, 0] = CONSTANT * EMBEDDING_DEVIATION
    model.model.norm.weight[0] = 0.0
    basis = _orthonormal(shape.hidden - 1, generator)
    seen = torch.cat((torch.zeros(size, 1), _orthonormal(shape.hidden - 1, generator)[:size]), dim=1)
    written = [torch.cat((torch.zeros(size, 1), basis[part * size : (part + 1) * size]), dim=1) for part in (0, 1)]
    heads = (0, shape.heads // 2)
    groups = shape.heads // shape.kv_heads
    attention = _attention(model, 0)
    for head, back, target in zip(heads, (1, 2), written, strict=True):
        query, key = _looking_back(back, size, shape.rope_theta)
        _rows(attention.q_proj.weight, head, size).zero_()[:, 0] = BACK_GAIN * query
        _rows(attention.k_proj.weight, head // groups, size).zero_()[:, 0] = BACK_GAIN * key
        _rows(attention.v_proj.weight, head // groups, size).copy_(seen)
        _columns(attention.o_proj.weight, head, size).copy_(WRITE_GAIN * EMBEDDING_DEVIATION * target.T)
    slow_dims = torch.tensor([half + pair for half in (0, size // 2) for pair in range(slow, size // 2)])
    for layer in MATCH_LAYERS:
        attention = _attention(model, layer)
        for head, wanted, offered in zip(heads, (seen, written[0]), written, strict=True):
            mixing = _orthonormal(size, generator)[: len(slow_dims)]
            query, key = torch.zeros(size, shape.hidden), torch.zeros(size, shape.hidden)
            query[slow_dims], key[slow_dims] = mixing @ wanted, mixing @ offered
            copied = torch.cat((torch.zeros(size, 1), _orthonormal(shape.hidden - 1, generator)[:size]), dim=1)
            _rows(attention.q_proj.weight, head, size).copy_(MATCH_GAIN * query)
            _rows(attention.k_proj.weight, head // groups, size).copy_(MATCH_GAIN * key)
            _rows(attention.v_proj.weight, head // groups, size).copy_(copied)
            _columns(attention.o_proj.weight, head, size).copy_(COPY_GAIN * EMBEDDING_DEVIATION * copied.T)


def _attention(model: Llama, layer: int) -> Attention:
    found = model.model.layers[layer].get_submodule("self_attn")
    assert isinstance(found, Attention)
    return found


def _orthonormal(size: int, generator: torch.Generator) -> Tensor:
    rotation: Tensor = torch.linalg.qr(torch.randn(size, size, generator=generator)).Q
    return rotation


def _looking_back(back: int, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Query and key whose rotary score, the sum of cos(angle * (distance - back)), is greatest ``back`` tokens ago."""
    angles = theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    used = (torch.arange(size // 2) < size // 4).float()
    query = torch.cat((used * torch.cos(angles * back), -used * torch.sin(angles * back)))
    return query, torch.cat((used, torch.zeros(size // 2)))


def _rows(weight: Tensor, head: int, size: int) -> Tensor:
    return weight[head * size : (head + 1) * size]


def _columns(weight: Tensor, head: int, size: int) -> Tensor:
    return weight[:, head * size : (head + 1) * size]
