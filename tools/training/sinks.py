"""Attention sinks (Xiao et al., 2023): how much attention BOS receives, and what is lost without it."""

import torch
from torch import Tensor
from torch.nn import functional

from tools.training.model import Llama, rotate


@torch.no_grad()
def mass_by_layer(model: Llama, ids: Tensor, first_query: int) -> list[float]:
    """Return the share of attention that position 0 receives from ``first_query`` on, the mean of each layer's heads.

    ids: [1, tokens].
    """
    cos, sin = model.get_buffer("cos")[: ids.shape[1]], model.get_buffer("sin")[: ids.shape[1]]
    masses = list[float]()
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    for number, (layer, entering) in enumerate(zip(model.model.layers, model.entering(ids), strict=False)):
        attention = model.attention_of(number)
        size, groups = model.shape.head_dim, model.shape.heads // model.shape.kv_heads
        x = layer.get_submodule("input_layernorm")(entering[0])
        query = rotate(attention.q_proj(x).unflatten(-1, (-1, size)).transpose(0, 1), cos, sin)[:, first_query:]
        key = rotate(attention.k_proj(x).unflatten(-1, (-1, size)).transpose(0, 1), cos, sin)
        scores = query @ key.repeat_interleave(groups, 0).transpose(1, 2) / size**0.5
        scores = scores.masked_fill(~causal[first_query:], -torch.inf)
        masses.append(float(scores.softmax(-1)[:, :, 0].mean()))
    return masses


@torch.no_grad()
def window_loss(model: Llama, ids: Tensor, *, window: int, sinks: int) -> float:
    """Return the loss in nats where each position sees the last ``window`` tokens and the first ``sinks`` ones.

    Only positions from which the window no longer reaches the sinks are counted. ids: [1, tokens].
    """
    tokens = ids.shape[1] - 1
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None]
    visible = (distance >= 0) & ((distance < window) | (torch.arange(tokens)[None] < sinks))
    losses = functional.cross_entropy(model(ids[:, :-1], visible)[0], ids[0, 1:], reduction="none")
    return float(losses[window + 4 :].mean())
