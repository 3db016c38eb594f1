"""Attention by flash-attn (Dao 2023): `flash_attn_with_kvcache` for decode rows, `flash_attn_varlen_func` for prompts.

Both read the slots in place through strided views of the cache. Not yet proven on a GPU: the calls are compared with
the signatures of flash-attn 2.8.3, and their arguments are tested against a reference of the documented semantics.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from engine.backends.device_arrays import on_device
from engine.batch import FlatBatch
from engine.cache import PagedCache
from engine.config import ModelConfig
from engine.weights import DecoderWeights

PAGE_UNIT: Final = 256
"""Tokens of which flash-attn's pages must be a multiple."""
LARGEST_HEAD: Final = 256
HEAD_UNIT: Final = 8
"""Dimensions of which heads must be a multiple: flash-attn pads others, which would copy the cache."""


@dataclass(frozen=True)
class _Calls:
    """Sequences of one kind in one KV group: S sequences."""

    rows: torch.Tensor  # int64: rows of the step
    table: torch.Tensor  # int32 [S, blocks]
    lengths: torch.Tensor  # int32 [S]: positions up to and with the last row
    query_starts: torch.Tensor  # int32 [S + 1]
    key_starts: torch.Tensor  # int32 [S + 1]
    most_queries: int
    most_keys: int


class FlashAttention:
    """Attention by the package flash-attn, on CUDA in float16 or bfloat16."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, library: Any = None) -> None:
        """`library`: a module with flash-attn's functions; None: flash-attn itself."""
        self._config = config
        self._device = weights.embedding.device
        self._library = library or import_module("flash_attn")

    def begin(self, plan: FlatBatch, cache: PagedCache) -> "_FlashStep":
        """Prepare a step."""
        kinds = [np.flatnonzero(plan.sizes == 1), np.flatnonzero(plan.sizes > 1)]
        calls = [
            [_calls(plan, cache, group, chunks, self._device) for chunks in kinds] for group in range(len(cache.groups))
        ]
        return _FlashStep(self._config, self._library, cache, calls)


class _FlashStep:
    def __init__(self, config: ModelConfig, library: Any, cache: PagedCache, calls: list[list[_Calls | None]]) -> None:
        self._config = config
        self._library = library
        self._cache = cache
        self._calls = calls

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Return the attention output [N, heads, head_dim] of rotated queries [N, heads, head_dim] of one layer."""
        config = self._config
        group, view = self._cache.layer_view(config.used_kv_layers[layer])
        k, v = (view[:, :, kind].transpose(1, 2) for kind in (0, 1))  # [slots, block_tokens, kv_heads, head_dim]
        window = self._cache.groups[group].window
        common = {
            "softmax_scale": config.attention_scale,
            "causal": True,
            "window_size": (window - 1, 0) if window else (-1, -1),
            "softcap": config.attention_softcap,
        }
        decodes, prompts = self._calls[group]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if decodes is not None:
            mixed = self._library.flash_attn_with_kvcache(
                q[decodes.rows].unsqueeze(1),
                k,
                v,
                cache_seqlens=decodes.lengths,
                block_table=decodes.table,
                **common,
            )
            out[decodes.rows] = mixed.squeeze(1)
        if prompts is not None:
            out[prompts.rows] = self._library.flash_attn_varlen_func(
                q[prompts.rows],
                k,
                v,
                cu_seqlens_q=prompts.query_starts,
                cu_seqlens_k=prompts.key_starts,
                max_seqlen_q=prompts.most_queries,
                max_seqlen_k=prompts.most_keys,
                block_table=prompts.table,
                **common,
            )
        return out


def _calls(
    plan: FlatBatch, cache: PagedCache, group: int, chunks: npt.NDArray[np.signedinteger], device: torch.device
) -> _Calls | None:
    if not len(chunks):
        return None
    sizes = plan.sizes[chunks]
    lengths = plan.starts[chunks] + sizes
    last = (lengths - 1) // cache.block_tokens
    table = plan.padded_tables(group, chunks, np.zeros_like(last), last)
    rows = np.flatnonzero(np.isin(plan.row_chunk, chunks)).astype(np.int32)
    starts = [np.concatenate([[0], np.cumsum(each)]).astype(np.int32) for each in (sizes, lengths)]
    placed = on_device(
        {
            "rows": rows,
            "table": np.maximum(table, 0),  # blocks behind a window may be gone; nothing of them is read
            "lengths": lengths,
            "queries": starts[0],
            "keys": starts[1],
        },
        device,
    )
    return _Calls(
        placed["rows"].long(),
        placed["table"],
        placed["lengths"],
        placed["queries"],
        placed["keys"],
        int(sizes.max()),
        int(lengths.max()),
    )
