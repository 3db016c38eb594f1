"""Memory of a step beside weights and cache, by which a cache can be sized before it is allocated."""

import numpy as np
import torch

from engine.backends.compiled import QUERY_TILE, num_parts
from engine.batch import ForwardBatch, SequenceChunk
from engine.config import ModelConfig
from engine.model import Model
from engine.sampling import SamplingRow, sample

_VALUE_NBYTES = 4  # on CPUs, what is not float32 is computed in it
_LOGITS_COPIES = 4  # logits, and what steering, log-probabilities and sampling make of them


def step_nbytes(model: Model, *, num_tokens: int, num_decoding: int, context: int, block_tokens: int) -> int:
    """Return the bytes that the largest step needs at its peak.

    It computes the last `num_tokens` of a prompt of `context` tokens beside `num_decoding` short sequences. On CUDA the
    step is run and measured, which raises `torch.OutOfMemoryError` if it does not fit; on a CPU it is estimated.
    """
    num_tokens = min(num_tokens, context)
    if model.device.type == "cuda":
        return _measured(model, num_tokens, num_decoding, context, block_tokens)
    return _estimated(model.config, model.backend.name == "compiled", num_tokens, num_decoding, context)


def gathered_block_nbytes(model: Model, block_tokens: int) -> int:
    """Return the bytes of a step for each block that its sequences hold: of backends that copy the keys and values of
    a layer before they attend. 0 for backends that read the slots in place.
    """
    if model.backend.name != "torch":
        return 0
    dtype: torch.dtype = getattr(torch, model.dtype)
    of_layer = max(2 * group.kv_heads * group.head_dim for group in model.kv_groups)
    return 2 * of_layer * block_tokens * dtype.itemsize  # as they are stored, and in the type of the computation


def _measured(model: Model, num_tokens: int, num_decoding: int, context: int, block_tokens: int) -> int:
    """Run the step in one slot, which stands for all: what it holds does not matter."""
    cache = model.new_cache((1,) * len(model.kv_groups), block_tokens)

    def chunk(count: int, end: int) -> SequenceChunk:
        tables = (np.zeros(-(-end // block_tokens), np.int32),) * len(model.kv_groups)
        return SequenceChunk(np.zeros(count, np.int32), end - count, tables, want_logits=True)

    batch = ForwardBatch([*(chunk(1, 1) for _ in range(num_decoding)), chunk(num_tokens, context)])
    rows = [SamplingRow(temperature=1.0, top_p=0.5, top_k=1, seed=0, choice=0, index=0, min_p=0.5)]
    torch.cuda.synchronize(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    logits = model.forward(batch, cache).nan_to_num()  # of slots that hold anything
    sample(logits, rows * len(logits))
    torch.cuda.synchronize(model.device)
    return torch.cuda.max_memory_allocated(model.device) - before


def _estimated(config: ModelConfig, compiled: bool, num_tokens: int, num_decoding: int, context: int) -> int:
    """Return the sum of the buffers of the CPU backends: activations, one layer's attention, and logits."""
    d, q, f = config.hidden_size, config.q_size, config.intermediate_size
    qkv, rows = q + 2 * config.kv_size, num_tokens + num_decoding
    row_values = 4 * d + qkv + 2 * q + 3 * f
    if config.int8_linears:
        row_values += max(d, q, f) + max(d, qkv, 2 * f)
    if config.experts is not None:
        row_values += (
            3 * config.experts.intermediate_size + config.experts.count + 2 * d * (1 + config.experts.per_token)
        )
    if compiled:
        shared = config.num_heads // config.num_kv_heads
        of_part = 2 * config.head_dim + shared * min(num_tokens, QUERY_TILE)
        attention = context * of_part * num_parts(num_tokens, torch.get_num_threads())
    else:
        attention = 4 * config.kv_size * context + config.num_heads * num_tokens * context
    logits = _LOGITS_COPIES * (num_decoding + 1) * config.vocab_size
    return _VALUE_NBYTES * (rows * row_values + attention + logits)
