"""The answer of a model whose prompt has a sibling's KV in some blocks, but for the layers that it computes itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine import ForwardBatch, LayerInputs, LayerSpan, Model, PagedCache, Recomputation, SequenceChunk
from worker.policy.reuse_profile import ReuseAccuracy, ReusePoint, ReuseProfile, save_reuse_profile

TOLERANCE = 1e-3


def write_profile(path: Path, sender: Model, receiver: Model, spans: Sequence[LayerSpan], /, **changed: Any) -> Path:
    """Write a profile with these points, of which each costs more than the one before it."""
    points = [
        ReusePoint(span.first, span.last, 0.1 * (i + 1), 0.9, 0.04 - 0.01 * i, (0.0, 0.1))
        for i, span in enumerate(spans)
    ]
    values: dict[str, Any] = {
        "sender": "sender",
        "sender_fingerprint": sender.fingerprint,
        "receiver": "receiver",
        "receiver_fingerprint": receiver.fingerprint,
        "tokenizer": "test",
        "dtype": "float32",
        "num_layers": sender.config.num_layers,
        "hidden_size": sender.config.hidden_size,
        "made": "2026-01-01",
        "data_sha256": "0" * 64,
        "contexts": 1,
        "questions": 1,
        "context_tokens": 100.0,
        "accuracy": ReuseAccuracy(0.1, 0.9, 0.5),
        "max_quality_loss": 0.05,
        "points": tuple(points),
    }
    save_reuse_profile(ReuseProfile(**values | changed), path)
    return path


def wrong_tokens(
    models: tuple[Model, Model],
    ids: list[int],
    answer: list[int],
    blocks: range,
    span: LayerSpan,
    block_tokens: int,
) -> list[int]:
    """Indices of the answer's tokens that lie more than the tolerance below the receiver's best.

    `models`: sender and receiver; `blocks` of the prompt `ids` have the sender's KV except in `span`.
    """
    sender, receiver = models
    every = np.array([*ids, *answer[:-1]], np.int32)
    tables = (np.arange(-(-len(every) // block_tokens), dtype=np.int32),)

    def chunk(start: int, end: int, *, logits: bool = False) -> SequenceChunk:
        return SequenceChunk(every[start:end], start, tables, want_logits=logits, every=logits)

    sent, mixed = (PagedCache(m.kv_groups, [len(tables[0])], block_tokens) for m in models)
    begin, end = blocks.start * block_tokens, blocks.stop * block_tokens
    entered = list[torch.Tensor]()
    wanted = LayerInputs(frozenset({span.first}), lambda _, rows: entered.append(rows.clone()))
    sender.forward(ForwardBatch([chunk(0, end)], layer_inputs=wanted), sent)
    if begin:
        receiver.forward(ForwardBatch([chunk(0, begin)]), mixed)
    for layer in range(sender.config.num_layers):
        if not span.first <= layer <= span.last:
            mixed.views[0][blocks.start : blocks.stop, layer] = sent.views[0][blocks.start : blocks.stop, layer]
    inputs = entered[0][begin:] if span.first else None
    receiver.forward(ForwardBatch([chunk(begin, end)], Recomputation(span, inputs)), mixed)
    rows = receiver.forward(ForwardBatch([chunk(end, len(every), logits=True)]), mixed)[-len(answer) :].numpy()
    return [i for i, token in enumerate(answer) if rows[i][token] < rows[i].max() - TOLERANCE]


def own_wrong_tokens(model: Model, ids: list[int], answer: list[int]) -> list[int]:
    """Likewise for a model that reuses nothing."""
    rows = model.score(np.array([*ids, *answer[:-1]], np.int32))[-len(answer) :]
    return [i for i, token in enumerate(answer) if rows[i][token] < rows[i].max() - TOLERANCE]
