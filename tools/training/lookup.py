"""Initialisation with a lookup circuit, similar to mimetic initialisation (Trockman & Kolter, 2023).

In a short run, a model this small sees too few tokens for induction heads (Olsson et al., 2022) to form. Their circuit
is therefore written into the initial weights and refined by training:

- One component of every embedding is a constant, which allows a head to attend by position alone. The final norm hides
  it from the (tied) output, whose gradient would otherwise turn it into the unigram bias.
- In layer 0, head 0 attends one token back and head 2 two tokens back. Each writes a projection of that token into a
  separate part of the residual stream.
- In layers 1 and 2, head 0 matches the current token with the keys' one-back part, and head 2 matches the one-back part
  with the keys' two-back part. Both copy the matched token towards the output.

The layers after the circuit receive attention sinks (`sinks.py`).
"""

import torch
from torch import Tensor

from tools.training import tokenizer as bpe
from tools.training.errors import UnsuitableShape
from tools.training.model import EMBEDDING_DEVIATION, Llama
from tools.training.sinks import HIDDEN_PARTS, hold, mark

BACK_GAIN = 1.0
WRITE_GAIN = 2.5
MATCH_GAIN = 2.3
COPY_GAIN = 16.0
MATCH_LAYERS = (1, 2)
SLOW_PAIRS_FROM = 7
"""Index of the first rotary pair that rotates by less than a radian over most of a window and so can match content."""


@torch.no_grad()
def write_lookup(model: Llama, seed: int) -> None:
    """Overwrite parts of an initialised model's embedding and of the attention of layers 0, 1 and 2.

    Raises UnsuitableShape if the model has fewer than three layers or two key/value heads, or if its hidden size is too
    small for the constant and both written parts.
    """
    shape, generator = model.shape, torch.Generator().manual_seed(seed)
    if shape.layers <= max(MATCH_LAYERS) or shape.kv_heads < 2 or 2 * shape.head_dim + HIDDEN_PARTS > shape.hidden:
        raise UnsuitableShape(
            f"the circuit needs {max(MATCH_LAYERS) + 1} layers, 2 key/value heads and a hidden size of at least "
            f"{2 * shape.head_dim + HIDDEN_PARTS}, got {shape.layers}, {shape.kv_heads} and {shape.hidden}"
        )
    size, slow = shape.head_dim, SLOW_PAIRS_FROM * shape.head_dim // 32
    mark(model)
    basis = _orthonormal(shape.hidden - HIDDEN_PARTS, generator)
    seen = torch.cat(
        (torch.zeros(size, HIDDEN_PARTS), _orthonormal(shape.hidden - HIDDEN_PARTS, generator)[:size]), dim=1
    )
    written = [
        torch.cat((torch.zeros(size, HIDDEN_PARTS), basis[part * size : (part + 1) * size]), dim=1) for part in (0, 1)
    ]
    heads = (0, shape.heads // 2)
    groups = shape.heads // shape.kv_heads
    attention = model.attention_of(0)
    for head, back, target in zip(heads, (1, 2), written, strict=True):
        query, key = _looking_back(back, size, shape.rope_theta)
        _rows(attention.q_proj.weight, head, size).zero_()[:, 0] = BACK_GAIN * query
        _rows(attention.k_proj.weight, head // groups, size).zero_()[:, 0] = BACK_GAIN * key
        _rows(attention.v_proj.weight, head // groups, size).copy_(seen)
        _columns(attention.o_proj.weight, head, size).copy_(WRITE_GAIN * EMBEDDING_DEVIATION * target.T)
    slow_dims = torch.tensor([half + pair for half in (0, size // 2) for pair in range(slow, size // 2)])
    for layer in MATCH_LAYERS:
        attention = model.attention_of(layer)
        for head, wanted, offered in zip(heads, (seen, written[0]), written, strict=True):
            mixing = _orthonormal(size, generator)[: len(slow_dims)]
            query, key = torch.zeros(size, shape.hidden), torch.zeros(size, shape.hidden)
            query[slow_dims], key[slow_dims] = mixing @ wanted, mixing @ offered
            copied = torch.cat(
                (torch.zeros(size, HIDDEN_PARTS), _orthonormal(shape.hidden - HIDDEN_PARTS, generator)[:size]), dim=1
            )
            _rows(attention.q_proj.weight, head, size).copy_(MATCH_GAIN * query)
            _rows(attention.k_proj.weight, head // groups, size).copy_(MATCH_GAIN * key)
            _rows(attention.v_proj.weight, head // groups, size).copy_(copied)
            _columns(attention.o_proj.weight, head, size).copy_(COPY_GAIN * EMBEDDING_DEVIATION * copied.T)
    ids = torch.randint(len(bpe.SPECIAL), shape.vocabulary, (1, 64), generator=generator)
    ids[0, 0] = bpe.BOS_ID
    hold(model, model.entering(ids))


def _orthonormal(size: int, generator: torch.Generator) -> Tensor:
    rotation: Tensor = torch.linalg.qr(torch.randn(size, size, generator=generator)).Q
    return rotation


def _looking_back(back: int, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return query and key whose rotary score, the sum of cos(angle * (distance - back)), peaks ``back`` tokens ago."""
    angles = theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    used = (torch.arange(size // 2) < size // 4).float()
    query = torch.cat((used * torch.cos(angles * back), -used * torch.sin(angles * back)))
    return query, torch.cat((used, torch.zeros(size // 2)))


def _rows(weight: Tensor, head: int, size: int) -> Tensor:
    return weight[head * size : (head + 1) * size]


def _columns(weight: Tensor, head: int, size: int) -> Tensor:
    return weight[:, head * size : (head + 1) * size]
