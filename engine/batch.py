"""Input of one forward step: chunks of sequences, and the flat arrays that the kernels read.

Decode rows (chunks of one token) and prefill chunks may be mixed in any order. A batch is validated here, once per
step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from engine.cache import PagedCache
from engine.config import ModelConfig
from engine.errors import InvalidBatch
from engine.layer_reuse import LayerInputs, LayerSpan, Recomputation
from engine.rolling import RollingWindow

IntArray = npt.NDArray[np.int32]
LayerHook = Callable[[int], None] | None
"""Function that a step calls with each layer, or None."""


@dataclass
class SequenceChunk:
    """Consecutive tokens of one sequence; the KV of positions 0..start-1 is already in the cache.

    `token_ids` is int32 [n]. `slot_tables` has one int32 array per KV group: the slots of the blocks of positions
    0..start+n-1, in order, and perhaps of later ones. In a window group, entries of blocks outside the window of every
    token of the chunk are ignored and may be -1. `want_logits` requests the logits of the last token, and together with
    `every` those of all n tokens. With `rolling`, what is visible is bounded, no token may be visible only to some of
    the chunk, and after the first slide the tables hold the sinks' slot and those of the window.
    """

    token_ids: IntArray
    start: int
    slot_tables: tuple[IntArray, ...]
    want_logits: bool
    every: bool = False  # with want_logits
    rolling: RollingWindow | None = None


@dataclass
class ForwardBatch:
    """The chunks of one step; no two may belong to the same sequence.

    With `recomputation`, only its layers are computed, and no chunk may want logits.
    """

    chunks: list[SequenceChunk]
    recomputation: Recomputation | None = None
    layer_inputs: LayerInputs | None = None


@dataclass(frozen=True)
class FlatBatch:
    """A validated batch as flat arrays: N tokens, C chunks, G KV groups. All arrays are int32.

    A position is an index into the slots of the sequence's table. It is that in the sequence unless a rolling window
    has slid.
    """

    token_ids: IntArray  # [N]
    positions: IntArray  # [N]
    rotations: IntArray  # [N]: positions in the sequence
    row_chunk: IntArray  # [N]: index of the token's chunk
    chunk_rows: IntArray  # [C + 1]: chunk c is rows chunk_rows[c]..chunk_rows[c+1]-1
    sizes: IntArray  # [C]: tokens of each chunk
    starts: IntArray  # [C]: position of the chunk's first token
    firsts: IntArray  # [G, C]: first position that is visible to the chunk, apart from the group's window
    tables: IntArray  # all slot tables, concatenated
    table_begin: IntArray  # [G, C]: where the chunk's table for a group begins in `tables`
    table_length: IntArray  # [G, C]
    block_tokens: int
    logits_rows: IntArray  # rows whose logits are computed: the last row, or every row, of each chunk that wants them
    max_context: int  # largest start + n
    span: LayerSpan  # layers that are computed
    only_kv: bool  # the span's last layer is computed only as far as its KV
    inputs: torch.Tensor | None  # [N, d]: what enters the span's first layer; None: the tokens' embeddings
    layer_inputs: LayerInputs | None
    device_ids: torch.Tensor | None = None  # [N]: ids on the device instead of `token_ids`, which then are stale

    def advanced(self, token_ids: IntArray | torch.Tensor, config: ModelConfig) -> "FlatBatch":
        """Return the step after this one, in which every chunk goes on with its next token: int32 [C] on the host, or
        integers [C] on the device, which need not be there yet.

        Only for a batch of single tokens and a cache without windows; the slot tables must hold further blocks already.
        What was validated is not validated again. Raises `InvalidBatch`.
        """
        starts = self.starts + 1
        if (starts >= self.table_length.min(axis=0) * self.block_tokens).any():
            raise InvalidBatch("the next token of a chunk needs a slot that its table does not hold")
        if self.max_context >= config.max_positions:
            raise InvalidBatch(f"a chunk must end by position {config.max_positions}, got {self.max_context + 1}")
        on_host, device_ids = self.token_ids, None
        if isinstance(token_ids, torch.Tensor):
            device_ids = token_ids
        else:
            _check_token_ids(token_ids, config)
            on_host = token_ids
        return replace(
            self,
            token_ids=on_host,
            device_ids=device_ids,
            positions=self.positions + 1,
            rotations=self.rotations + 1,
            starts=starts,
            max_context=self.max_context + 1,
        )

    def padded_tables(
        self, group: int, chunks: npt.NDArray[np.signedinteger], first: IntArray, last: IntArray
    ) -> IntArray:
        """Return the slots of each chunk's blocks `first` to `last`, [chunks, most blocks]; the last is repeated."""
        blocks = np.minimum(first[:, None] + np.arange((last - first).max() + 1), last[:, None])
        found: IntArray = self.tables[self.table_begin[group][chunks][:, None] + blocks]
        return found


def flatten_batch(batch: ForwardBatch, config: ModelConfig, cache: PagedCache) -> FlatBatch:
    """Validate the batch against model and cache and flatten it. Raises `InvalidBatch`."""
    chunks = batch.chunks
    if not chunks:
        raise InvalidBatch("a forward batch must have at least one chunk")
    num_groups = len(cache.groups)
    for index, chunk in enumerate(chunks):
        if len(chunk.slot_tables) != num_groups:
            raise InvalidBatch(f"chunk {index} must have {num_groups} slot tables, got {len(chunk.slot_tables)}")
    sizes = np.array([len(chunk.token_ids) for chunk in chunks], np.int32)
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    if starts.min() < 0:
        raise InvalidBatch(f"chunk {int(starts.argmin())} must start at 0 or later, got {starts.min()}")
    slid, firsts = _rolled(chunks, cache)
    starts -= slid
    ends = starts + sizes
    token_ids = np.concatenate([chunk.token_ids for chunk in chunks]).astype(np.int32, copy=False)
    if sizes.min() <= 0:
        raise InvalidBatch(f"chunk {int(sizes.argmin())} must have at least one token, got none")
    max_context = int(ends.max())
    if max_context > config.max_positions:
        bad = int(ends.argmax())
        raise InvalidBatch(f"chunk {bad} must end by position {config.max_positions}, got {max_context}")
    _check_token_ids(token_ids, config)
    flat = [chunk.slot_tables[group] for group in range(num_groups) for chunk in chunks]
    lengths = np.array([len(table) for table in flat], np.int32)
    begins = np.cumsum(lengths, dtype=np.int32) - lengths
    recomputation = _checked_recomputation(batch, config, len(token_ids))
    chunk_rows = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(sizes, out=chunk_rows[1:])
    row_chunk = np.repeat(np.arange(len(chunks), dtype=np.int32), sizes)
    positions = np.arange(len(token_ids), dtype=np.int32) + (starts - chunk_rows[:-1])[row_chunk]
    plan = FlatBatch(
        token_ids=token_ids,
        positions=positions,
        rotations=positions + slid[row_chunk],
        row_chunk=row_chunk,
        chunk_rows=chunk_rows,
        sizes=sizes,
        starts=starts,
        firsts=firsts,
        tables=np.concatenate(flat).astype(np.int32, copy=False),
        table_begin=begins.reshape(num_groups, -1),
        table_length=lengths.reshape(num_groups, -1),
        block_tokens=cache.block_tokens,
        logits_rows=_logits_rows(chunks, chunk_rows),
        max_context=max_context,
        span=recomputation.span if recomputation else LayerSpan(0, config.num_layers - 1),
        only_kv=recomputation is not None,
        inputs=recomputation.inputs if recomputation else None,
        layer_inputs=batch.layer_inputs,
    )
    for group in range(num_groups):
        _check_tables(plan, cache, group, ends)
    return plan


def _check_token_ids(token_ids: IntArray, config: ModelConfig) -> None:
    if token_ids.min() < 0 or token_ids.max() >= config.vocab_size:
        raise InvalidBatch(f"token ids must be in 0..{config.vocab_size - 1}, got {token_ids.min()}..{token_ids.max()}")


def _checked_recomputation(batch: ForwardBatch, config: ModelConfig, rows: int) -> Recomputation | None:
    """Return the batch's recomputation; raise `InvalidBatch` if the model or its inputs do not allow it."""
    wanted = batch.layer_inputs.layers if batch.layer_inputs else frozenset()
    if wanted and not (min(wanted) >= 0 and max(wanted) < config.num_layers):
        raise InvalidBatch(f"inputs of layers must be of 0..{config.num_layers - 1}, got {sorted(wanted)}")
    if (recomputation := batch.recomputation) is None:
        return None
    span, inputs = recomputation.span, recomputation.inputs
    if span.last >= config.num_layers:
        raise InvalidBatch(f"a span must end by layer {config.num_layers - 1}, got {span.first}..{span.last}")
    if len(config.kv_layers) < config.num_layers:
        raise InvalidBatch("a span can be computed only if every layer of the model has KV of its own")
    if any(chunk.want_logits for chunk in batch.chunks):
        raise InvalidBatch("no chunk may want logits in a step that computes a span of layers")
    if (inputs is None) != (span.first == 0):
        found = "none" if inputs is None else "some"
        raise InvalidBatch(f"a span from layer {span.first} needs inputs unless it is the first layer, got {found}")
    if inputs is not None and inputs.shape != (rows, config.hidden_size):
        raise InvalidBatch(f"the span's inputs must be [{rows}, {config.hidden_size}], got {list(inputs.shape)}")
    return recomputation


def _logits_rows(chunks: list[SequenceChunk], chunk_rows: IntArray) -> IntArray:
    if not any(chunk.every for chunk in chunks):
        return np.array([chunk_rows[i + 1] - 1 for i, c in enumerate(chunks) if c.want_logits], np.int32)
    spans = zip(chunks, chunk_rows[:-1].tolist(), chunk_rows[1:].tolist(), strict=True)
    wanted = [np.arange(begin if c.every else end - 1, end) for c, begin, end in spans if c.want_logits]
    return np.concatenate([chunk_rows[:0], *wanted]).astype(np.int32)


def _rolled(chunks: list[SequenceChunk], cache: PagedCache) -> tuple[IntArray, IntArray]:
    """Return how far each chunk's sequence has slid, [C], and its first visible position per group, [G, C].

    Raises `InvalidBatch`.
    """
    slid, firsts = np.zeros(len(chunks), np.int32), np.zeros((len(cache.groups), len(chunks)), np.int32)
    for index, chunk in enumerate(chunks):
        if (rolling := chunk.rolling) is None:
            continue
        if rolling.block_tokens != cache.block_tokens:
            raise InvalidBatch(
                f"the window of chunk {index} must have blocks of {cache.block_tokens}, got {rolling.block_tokens}"
            )
        end, slide = chunk.start + len(chunk.token_ids), rolling.end(chunk.start)
        if end > slide:
            raise InvalidBatch(f"chunk {index} must end by position {slide}, where its window slides, got {end}")
        if start := rolling.start(chunk.start):
            slid[index] = start - cache.block_tokens
            firsts[:, index] = np.where(cache.windows, cache.block_tokens, cache.block_tokens - rolling.sinks)
    return slid, firsts


def first_visible(position: int, window: int, first: int) -> int:
    """Return the earliest position visible to a query at `position`, `first` or later.

    A window of 0 means full attention.
    """
    return max(first, position - window + 1) if window else first


def _check_tables(plan: FlatBatch, cache: PagedCache, group: int, ends: IntArray) -> None:
    """Check that every block read or written by a chunk has an existing slot. Raises `InvalidBatch`.

    Without a window, later blocks in the table must have one, too (`FlatBatch.advanced`).
    """
    block_tokens, window = cache.block_tokens, cache.groups[group].window
    needed = -(-ends // block_tokens)
    if (plan.table_length[group] < needed).any():
        bad = int(np.argmax(plan.table_length[group] < needed))
        found = plan.table_length[group][bad]
        raise InvalidBatch(
            f"chunk {bad} needs {needed[bad]} slots of group {group} up to position {ends[bad]}, got {found}"
        )
    first = plan.firsts[group]
    first = (np.maximum(plan.starts - window + 1, first) if window else first) // block_tokens
    begins = plan.table_begin[group]
    ends_checked = begins + (needed if window else plan.table_length[group])
    lows, highs = _range_extremes(plan.tables, begins + first, ends_checked)
    if lows < 0 or highs >= cache.num_slots[group]:
        raise InvalidBatch(f"slots of group {group} must be in 0..{cache.num_slots[group] - 1}, got {lows}..{highs}")


def _range_extremes(
    values: IntArray, begins: npt.NDArray[np.signedinteger], ends: npt.NDArray[np.signedinteger]
) -> tuple[int, int]:
    """Return the smallest and largest of `values` over all ranges begins[i]..ends[i]-1, none of which may be empty."""
    bounds = np.empty(2 * len(begins), np.intp)
    bounds[0::2], bounds[1::2] = begins, ends
    if bounds[-1] == len(values):  # reduceat requires indices inside the array, but the last range may end at its end
        bounds = bounds[:-1]
    return int(np.minimum.reduceat(values, bounds)[::2].min()), int(np.maximum.reduceat(values, bounds)[::2].max())
