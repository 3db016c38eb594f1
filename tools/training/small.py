"""A sibling with small KV that starts from a trained model of the same depth and sizes (Ainslie et al., GQA, 2023).

Each key/value head is the mean of the heads that it replaces, and KV that layers share is the mean of theirs. Learned
sinks take the place of BOS, which windows no longer reach: they begin with its score, and its mark is removed.
"""

import torch
from torch import Tensor

from tools.training import tokenizer as bpe
from tools.training.errors import UnsuitableShape
from tools.training.model import Llama, ModelShape
from tools.training.sinks import FIRST_LAYER, SCORE

FAINT = -4.0
"""Score of the sinks before `FIRST_LAYER`, where attention does not need them."""


@torch.no_grad()
def small_from(base: Llama, shape: ModelShape) -> Llama:
    """Return a model of ``shape`` with the weights of ``base``. Raises UnsuitableShape if other sizes differ."""
    for name in ("layers", "hidden", "heads", "head_dim", "intermediate", "vocabulary", "positions"):
        if getattr(shape, name) != getattr(base.shape, name):
            raise UnsuitableShape(
                f"{name} must be the base's ({getattr(base.shape, name)}), got {getattr(shape, name)}"
            )
    if base.shape.kv_heads % shape.kv_heads:
        raise UnsuitableShape(f"kv_heads must divide the base's ({base.shape.kv_heads}), got {shape.kv_heads}")
    model = Llama(shape)
    given, made = base.state_dict(), dict[str, Tensor]()
    for name, blank in model.state_dict().items():
        if name.endswith("self_attn.sinks"):
            made[name] = torch.full_like(blank, SCORE if _layer(name) >= FIRST_LAYER else FAINT)
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            sharing = [layer for layer in range(shape.layers) if shape.owner_of(layer) == _layer(name)]
            own = f"layers.{_layer(name)}."
            each = torch.stack([given[name.replace(own, f"layers.{layer}.")] for layer in sharing])
            heads = each.reshape(len(sharing), shape.kv_heads, -1, shape.head_dim, shape.hidden)
            made[name] = heads.mean(dim=(0, 2)).flatten(0, 1)
            if shape.sinks and _layer(name) >= FIRST_LAYER:
                made[name][:, 1] = 0.0
        else:
            made[name] = given[name].clone()
            if shape.sinks and name.endswith("embed_tokens.weight"):
                made[name][bpe.BOS_ID, 1] = 0.0
    model.load_state_dict(made)
    return model


def _layer(name: str) -> int:
    return int(name.split(".")[2])
