"""Attention sinks (Xiao et al., 2023): written into BOS and held while training; their mass, and the loss without them.

They do not form in a short run, although BOS is at position 0 of every window, and training at the full rate removes
those that are only initialised. So two components of the residual stream are kept from training:

- The first is the same constant in every embedding, which also allows the heads of layer 0 to attend by position.
- The second is large in the embedding of BOS and zero in all others.

No layer writes to them, and the final norm hides them from the (tied) output, whose gradient would otherwise turn the
constant into the unigram bias. In the layers after the circuit of `lookup.py`, the keys turn the mark of BOS into a
score against the queries' constant, in the slowest rotary pair, which hardly depends on the distance. The values ignore
the mark, so a head that attends to BOS adds almost nothing.
"""

import torch
from torch import Tensor
from torch.nn import functional

from tools.training import tokenizer as bpe
from tools.training.model import EMBEDDING_DEVIATION, Llama, rotate

CONSTANT = 6.0
BOS_MARK = 300.0
HIDDEN_PARTS = 2
"""Components that mark: the constant, and BOS."""
FIRST_LAYER = 3
SCORE = 7.0
"""Mean score of BOS against a layer's queries, to which training adds what the other components contribute."""


@torch.no_grad()
def mark(model: Llama) -> None:
    """Set both components in the embedding, and let no layer write to them."""
    embedding = model.model.embed_tokens.weight
    embedding[:, 0] = CONSTANT * EMBEDDING_DEVIATION
    embedding[:, 1] = 0.0
    embedding[bpe.BOS_ID, 1] = BOS_MARK * EMBEDDING_DEVIATION
    model.model.norm.weight[:HIDDEN_PARTS] = 0.0
    for layer in model.model.layers:
        layer.get_parameter("self_attn.o_proj.weight")[:HIDDEN_PARTS] = 0.0
        layer.get_parameter("mlp.down_proj.weight")[:HIDDEN_PARTS] = 0.0
        layer.get_parameter("input_layernorm.weight")[:HIDDEN_PARTS] = 1.0


@torch.no_grad()
def hold(model: Llama, entering: list[Tensor]) -> None:
    """Set both components again, and let BOS score SCORE against the queries of the layers from FIRST_LAYER on.

    entering: the residual streams of windows that begin with BOS, as `Llama.entering` returns them; norms shrink the
    constant as the streams grow, and the queries make up for it.
    """
    mark(model)
    size = model.shape.head_dim
    for number in range(FIRST_LAYER, model.shape.layers):
        attention = model.attention_of(number)
        normed = functional.rms_norm(entering[number].detach().float(), (model.shape.hidden,))
        strength = (SCORE * size**0.5 / float(normed[:, 1:, 0].mean() * normed[:, 0, 1].mean())) ** 0.5
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight[:, :HIDDEN_PARTS] = 0.0
        attention.q_proj.weight[size // 2 - 1 :: size, 0] = strength
        attention.k_proj.weight[size // 2 - 1 :: size, 1] = strength
        attention.v_proj.weight[:, 1] = 0.0


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
