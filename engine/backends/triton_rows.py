"""Operations on the rows of a step between its matrix products by the Triton kernels: few launches, and rows of padding
that leave the cache as it is.
"""

import torch

from engine.backends import triton_row_kernels as kernels
from engine.backends.interface import RowPlaces
from engine.cache import PagedCache
from engine.config import ModelConfig
from engine.weights import DecoderWeights

_ROW_PER_WARPS = 2048  # values of a row for which 4 warps are enough


class TritonRows:
    """The interface `RowOperations` in Triton, on CUDA or in Triton's interpreter."""

    masks_padding = True

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self._config = config
        self._weights = weights

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the RMS norms of x [N, d] times weight [d]."""
        return self._add_and_norm(x, None, weight, weight)[1]

    def add_and_norm(
        self, x: torch.Tensor, h: torch.Tensor, post_weight: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (x + h, its RMS norms times weight [d]) for x and h [N, d].

        h is normalised with `post_weight` [d | 0] first unless that is empty.
        """
        return self._add_and_norm(x, h, post_weight, weight)

    def _add_and_norm(
        self, x: torch.Tensor, h: torch.Tensor | None, post_weight: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, size = x.contiguous(), x.shape[1]
        total, normed = x if h is None else torch.empty_like(x), torch.empty_like(x)
        width = _power_of_two(size)
        kernels.add_and_norm[(len(x),)](
            x,
            x if h is None else h.contiguous(),
            post_weight,
            weight,
            total,
            normed,
            self._config.rms_norm_eps,
            SIZE=size,
            WIDTH=width,
            ADDS=h is not None,
            POST_NORM=h is not None and bool(post_weight.numel()),
            num_warps=min(16, 4 * -(-width // _ROW_PER_WARPS)),
        )
        return total, normed

    def place_heads(self, layer: int, qkv: torch.Tensor, places: RowPlaces, cache: PagedCache) -> torch.Tensor:
        """Return the normalised and rotated queries, [N, heads, head_dim], and write keys and values into the cache.

        `qkv` is [N, queries, then keys and values unless the layer uses those of another one].
        """
        config, w, rope = self._config, self._weights, self._config.layer_ropes[layer]
        group, view = cache.layer_view(config.used_kv_layers[layer])
        unit = config.kv_scale_group or config.head_dim
        q = qkv.new_empty(len(qkv), config.num_heads, config.head_dim)
        kernels.place_heads[len(qkv), qkv.shape[1] // config.head_dim](
            qkv.contiguous(),
            w.q_norm[layer],
            w.k_norm[layer],
            places.cos[rope],
            places.sin[rope],
            places.slots[group],
            places.offsets,
            q,
            view,
            view.stride(0),
            config.rms_norm_eps,
            HEADS=config.num_heads,
            KV_HEADS=config.num_kv_heads,
            HEAD_DIM=config.head_dim,
            UNIT=unit,
            UNITS=_power_of_two(config.head_dim // unit),
            UNIT_WIDTH=_power_of_two(unit),
            BLOCK_TOKENS=view.shape[3],
            ROW=view.shape[4],
            INT8=bool(config.kv_scale_group),
            NORM=config.qk_norm,
            num_warps=1,
        )
        return q


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
