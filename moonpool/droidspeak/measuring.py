"""Answers of a receiver that reuses a sender's KV of the context, for every group of layers that it computes itself.

Greedy decoding gives the expected answer exactly if each of its tokens is the most likely one after those before it, so
one step per question suffices. A group `first..last` needs no computation of its own: its KV is that of `first..L-1`.
"""

from collections.abc import Callable, Collection, Iterator

import numpy as np
import numpy.typing as npt
import torch

from engine import ForwardBatch, LayerInputs, LayerSpan, Model, PagedCache, Recomputation, SequenceChunk
from moonpool.droidspeak.examples import AskedQuestion, Examples, Ids, SharedContext
from moonpool.droidspeak.frontier import Answers

BLOCK_TOKENS = 16
CHUNK_TOKENS = 512


class ContextCache:
    """A context's KV in `model`'s layout, with room for the questions after it."""

    def __init__(self, model: Model, context: SharedContext) -> None:
        self.model, self.context = model, context
        length = len(context.ids)
        self._table = np.arange(-(-length // BLOCK_TOKENS), dtype=np.int32)
        self._full = length // BLOCK_TOKENS
        self._questions = list[tuple[AskedQuestion, Ids]]()
        slots = len(self._table)
        for question in context.questions:
            end = length + len(question.question) + len(question.answer) - 1
            own = -(-end // BLOCK_TOKENS) - self._full
            self._questions.append((question, np.arange(slots, slots + own, dtype=np.int32)))
            slots += own
        self.cache = PagedCache(model.kv_groups, [slots] * len(model.kv_groups), BLOCK_TOKENS, device=model.device)

    def chunks(self) -> Iterator[SequenceChunk]:
        """Return the context in chunks."""
        ids, tables = self.context.ids, (self._table,) * len(self.cache.groups)
        for start in range(0, len(ids), CHUNK_TOKENS):
            yield SequenceChunk(ids[start : start + CHUNK_TOKENS], start, tables, want_logits=False)

    def prefill(self, layers: frozenset[int] = frozenset()) -> dict[int, torch.Tensor]:
        """Compute the context; return what enters `layers`, [tokens, hidden_size] each."""
        found: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
        wanted = LayerInputs(layers, lambda layer, rows: found[layer].append(rows.clone()))
        for chunk in self.chunks():
            self.model.forward(ForwardBatch([chunk], layer_inputs=wanted), self.cache)
        return {layer: torch.cat(rows) for layer, rows in found.items()}

    def recompute(self, span: LayerSpan, inputs: torch.Tensor | None) -> None:
        """Compute the context's KV in `span` from what enters its first layer; None: the tokens."""
        for chunk in self.chunks():
            rows = None if inputs is None else inputs[chunk.start : chunk.start + len(chunk.token_ids)]
            self.model.forward(ForwardBatch([chunk], Recomputation(span, rows)), self.cache)

    def take(self, other: "ContextCache", layers: range) -> None:
        """Copy the context's KV of `layers`."""
        slots = len(self._table)
        for layer in layers:
            group = int(self.cache.layer_group[layer])
            depth = self.cache.groups[group].layers.index(layer)
            self.cache.views[group][:slots, depth] = other.cache.views[group][:slots, depth]

    def answers(self) -> npt.NDArray[np.bool_]:
        """Return which questions are answered exactly, bool [questions]."""
        length, groups = len(self.context.ids), len(self.cache.groups)
        chunks, expected = list[SequenceChunk](), list[Ids]()
        for question, own in self._questions:
            if length % BLOCK_TOKENS:  # the context's last block continues with the question
                for view in self.cache.views:
                    view[int(own[0])] = view[int(self._table[-1])]
            table = np.concatenate([self._table[: self._full], own])
            ids = np.concatenate([question.question, question.answer[:-1]])
            chunks.append(SequenceChunk(ids, length, (table,) * groups, want_logits=True, every=True))
            expected.append(question.answer)
        likely = self.model.forward(ForwardBatch(chunks), self.cache).argmax(dim=-1).cpu().numpy()
        ends = np.cumsum([len(chunk.token_ids) for chunk in chunks])
        return np.array([(likely[end - len(ids) : end] == ids).all() for end, ids in zip(ends, expected, strict=True)])


def groups_of(num_layers: int) -> set[LayerSpan]:
    """Return all groups of consecutive layers but that of all layers."""
    every = {LayerSpan(first, last) for first in range(num_layers) for last in range(first, num_layers)}
    return every - {LayerSpan(0, num_layers - 1)}


def measure(
    sender: Model,
    receiver: Model,
    examples: Examples,
    progress: Callable[[int], None],
    groups: Collection[LayerSpan] = (),
) -> Answers:
    """Answer all questions with each of `groups`, by default all; `progress` is called with the contexts done."""
    num_layers = receiver.config.num_layers
    spans = sorted(set(groups) or groups_of(num_layers), key=lambda span: (span.first, span.last))
    firsts = sorted({span.first for span in spans})
    ways: dict[str | LayerSpan, list[npt.NDArray[np.bool_]]] = {}
    for done, context in enumerate(examples.contexts, 1):
        sent, own, mixed = (
            ContextCache(sender, context),
            ContextCache(receiver, context),
            ContextCache(receiver, context),
        )
        inputs = sent.prefill(frozenset(firsts) - {0})
        own.prefill()
        ways.setdefault("sender", []).append(sent.answers())
        ways.setdefault("receiver", []).append(own.answers())
        mixed.take(sent, range(num_layers))
        ways.setdefault("all_reused", []).append(mixed.answers())
        computed = ContextCache(receiver, context)
        for first in firsts:
            computed.recompute(LayerSpan(first, num_layers - 1), inputs.get(first))
            mixed.take(sent, range(num_layers))
            for span in (span for span in spans if span.first == first):
                mixed.take(computed, range(first, span.last + 1))
                ways.setdefault(span, []).append(mixed.answers())
        progress(done)
    right = {way: np.concatenate(each) for way, each in ways.items()}
    counts = [len(context.questions) for context in examples.contexts]
    return Answers(
        contexts=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        sender=right["sender"],
        receiver=right["receiver"],
        all_reused=right["all_reused"],
        groups={span: right[span] for span in spans},
    )
