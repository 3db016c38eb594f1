"""Operations on the rows of a step between its matrix products, in plain torch operations."""

import torch
import torch.nn.functional as F

from engine.backends.interface import RowPlaces
from engine.cache import PagedCache
from engine.config import ModelConfig
from engine.int8_rows import stored_rows
from engine.rope import rotated
from engine.weights import DecoderWeights


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norms of x [..., d] times weight [d], in x's dtype."""
    if weight.dtype == x.dtype:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)


class TorchRows:
    """The interface `RowOperations` in torch, on any device and in any dtype."""

    masks_padding = False

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self._config = config
        self._weights = weights

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the RMS norms of x [N, d] times weight [d]."""
        return rms_norm(x, weight, self._config.rms_norm_eps)

    def add_and_norm(
        self, x: torch.Tensor, h: torch.Tensor, post_weight: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (x + h, its RMS norms times weight [d]) for x and h [N, d].

        h is normalised with `post_weight` [d | 0] first unless that is empty.
        """
        x = x + (self.norm(h, post_weight) if post_weight.numel() else h)
        return x, self.norm(x, weight)

    def place_heads(self, layer: int, qkv: torch.Tensor, places: RowPlaces, cache: PagedCache) -> torch.Tensor:
        """Return the normalised and rotated queries, [N, heads, head_dim], and write keys and values into the cache.

        `qkv` is [N, queries, then keys and values unless the layer uses those of another one].
        """
        config, w, rope = self._config, self._weights, self._config.layer_ropes[layer]
        heads = qkv.view(len(qkv), -1, config.head_dim)
        q, k, v = heads.tensor_split([config.num_heads, config.num_heads + config.num_kv_heads], dim=1)
        if config.qk_norm:
            q, k = self.norm(q, w.q_norm[layer]), self.norm(k, w.k_norm[layer])
        cos, sin = places.cos[rope][:, None], places.sin[rope][:, None]
        if k.numel():
            group, view = cache.layer_view(config.used_kv_layers[layer])
            slots = places.slots[group]
            view[slots, :, 0, places.offsets] = stored_rows(rotated(k, cos, sin), config.kv_scale_group)
            view[slots, :, 1, places.offsets] = stored_rows(v, config.kv_scale_group)
        return rotated(q, cos, sin)
