"""The joined nodes, the candidates of each model as arrays, and the detection of nodes that stopped reporting.

Liveness needs its own time-out because a process that hangs keeps its streams open.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from conductor.policy.events import NodeView
from worker.policy.cost_formulas import read_nbytes

__all__ = [
    "DECODE_CANDIDATE",
    "PREFILL_CANDIDATE",
    "Candidates",
    "Liveness",
    "ModelNodes",
    "NodeTable",
    "unobserved_ns",
]

Ints = NDArray[np.int64]
_UNLIMITED = 1 << 62
_MAX_KEPT = 64


PREFILL_CANDIDATE: Final = np.dtype(
    [
        ("slot", np.int64),
        ("pool_slot", np.int64),  # of its own pool node, NONE without one
        # Written by `kernels.prefixes`:
        ("own_blocks", np.int64),  # of the prompt, on its own pool node
        ("own_ssd_blocks", np.int64),  # of those, on SSD only
        # Given:
        ("local_blocks", np.int64),  # of the prompt, in the node's own memory
        # Written by `kernels.queue_position`, the seconds of prefills that precede the request, or given:
        ("queue_s", np.float64),
        # Written by `kernels.score_prefill`:
        ("transfer_s", np.float64),
        ("prefill_s", np.float64),
        ("reuse_blocks", np.int64),
        ("fetches", np.bool_),  # a part of them from the best pool node
    ],
    align=True,
)
"""A prefill candidate and its predictions for one request."""

DECODE_CANDIDATE: Final = np.dtype(
    [
        ("slot", np.int64),
        ("capacity_tokens", np.int64),
        ("max_batch", np.int64),
        # Written by `decode.pick_decode`:
        ("tbt_s", np.float64),  # with the request in its batch
        ("free_tokens", np.int64),
    ]
)
"""A decode candidate and its predictions for one request."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Nodes that can take one kind of work, as parallel arrays sorted by node id, so that ties go to the smallest id.

    `slots` are indices into arrays of per-node values, such as the sums of `ClusterState.tally`.
    """

    ids: tuple[str, ...]
    pools: tuple[str, ...]
    slots: Ints
    capacity_tokens: Ints
    max_model_len: Ints
    max_batch: Ints
    is_aggregated: NDArray[np.bool_]
    pool_slots: Ints  # slots of their pool nodes; -1: none, or suspect
    floor_capacity: int  # minimum of capacity_tokens: a request within it fits on every node
    floor_len: int  # minimum of max_model_len
    has_aggregated: bool
    kept: "dict[bytes, Candidates]"  # cache of `where`, by the bytes of its mask

    def __len__(self) -> int:
        return len(self.ids)

    def prefill_records(self) -> NDArray[np.void]:
        """Return PREFILL_CANDIDATE [nodes], of which only the slots are known; without blocks in their own memory."""
        records = np.empty(len(self.ids), PREFILL_CANDIDATE)
        records["local_blocks"] = 0
        records["slot"], records["pool_slot"] = self.slots, self.pool_slots
        return records

    def decode_records(self) -> NDArray[np.void]:
        """Return DECODE_CANDIDATE [nodes], without predictions."""
        records = np.empty(len(self.ids), DECODE_CANDIDATE)
        records["slot"], records["capacity_tokens"] = self.slots, self.capacity_tokens
        records["max_batch"] = self.max_batch
        return records

    def where(self, keep: NDArray[np.bool_]) -> "Candidates":
        """Return the candidates for which the boolean mask `keep` is true, in the same order."""
        if keep.all():
            return self
        name = keep.tobytes()
        if name not in self.kept:
            if len(self.kept) >= _MAX_KEPT:
                self.kept.clear()
            chosen = np.flatnonzero(keep)
            self.kept[name] = Candidates.of(
                tuple(self.ids[i] for i in chosen),
                tuple(self.pools[i] for i in chosen),
                self.slots[chosen],
                self.capacity_tokens[chosen],
                self.max_model_len[chosen],
                self.max_batch[chosen],
                self.is_aggregated[chosen],
                self.pool_slots[chosen],
            )
        return self.kept[name]

    def only(self, index: int) -> "Candidates":
        """Return the candidate at `index` alone."""
        keep = np.zeros(len(self), bool)
        keep[index] = True
        return self.where(keep)

    def without(self, excluded: tuple[str, ...]) -> "Candidates":
        """Return all candidates except the named nodes."""
        return self.where(np.array([node_id not in excluded for node_id in self.ids], bool)) if excluded else self

    @classmethod
    def of(
        cls,
        ids: tuple[str, ...],
        pools: tuple[str, ...],
        slots: Ints,
        capacity_tokens: Ints,
        max_model_len: Ints,
        max_batch: Ints,
        is_aggregated: NDArray[np.bool_],
        pool_slots: Ints,
    ) -> "Candidates":
        """Build from the columns, computing the derived fields."""
        return cls(
            ids,
            pools,
            slots,
            capacity_tokens,
            max_model_len,
            max_batch,
            is_aggregated,
            pool_slots,
            int(capacity_tokens.min(initial=_UNLIMITED)),
            int(max_model_len.min(initial=_UNLIMITED)),
            bool(is_aggregated.any()),
            {},
        )


@dataclass(frozen=True, slots=True)
class ModelNodes:
    """One model's nodes by role; aggregated nodes, which also decode, are among the prefill nodes."""

    model: str
    block_tokens: int
    kv_sizes: tuple[int, int, int]  # after the count of blocks, the arguments of `cost_formulas.read_nbytes`
    prefill: Candidates  # prefill and aggregated nodes
    decode: Candidates
    all_prefill: Candidates  # including draining and suspect nodes
    all_decode: Candidates

    def read_nbytes(self, blocks: int) -> int:
        """Return the bytes of the last `blocks` blocks of a prefix."""
        return read_nbytes(blocks, *self.kv_sizes)

    @property
    def all_slots(self) -> Ints:
        """Slots of all nodes of the model."""
        return np.concatenate([self.all_prefill.slots, self.all_decode.slots])


class NodeTable:
    """All joined nodes. Each has a slot, a small number that is reused only after the node has left."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeView] = {}
        self._slots: dict[str, int] = {}
        self._draining: set[str] = set()
        self._suspect: frozenset[str] = frozenset()
        self._names: list[str | None] = []
        self._models: dict[str, ModelNodes] = {}
        self._rosters: tuple[tuple[tuple[str, ...], Ints], ...] = ()  # last arguments and results of `answering_slots`

    def __contains__(self, node_id: object) -> bool:
        return node_id in self._nodes

    def __iter__(self) -> Iterator[NodeView]:
        return iter([self._nodes[node_id] for node_id in sorted(self._nodes)])

    @property
    def num_slots(self) -> int:
        """Length of arrays indexed by slot."""
        return len(self._names)

    def add(self, node: NodeView) -> None:
        """Add a node, or replace its description under the same slot."""
        if node.node_id not in self._slots:
            slot = self._names.index(None) if None in self._names else len(self._names)
            self._names[slot : slot + 1] = [node.node_id]
            self._slots[node.node_id] = slot
        self._nodes[node.node_id] = node
        self._draining.discard(node.node_id)
        self._changed()

    def remove(self, node_id: str) -> None:
        """Remove a node. Its slot may be reused, so nothing may refer to it afterwards."""
        del self._nodes[node_id]
        self._names[self._slots.pop(node_id)] = None
        self._draining.discard(node_id)
        self._changed()

    def set_draining(self, node_id: str, draining: bool) -> None:
        """Set whether the node is draining; a draining node is not a candidate."""
        if draining != (node_id in self._draining):
            (self._draining.add if draining else self._draining.discard)(node_id)
            self._changed()

    def is_draining(self, node_id: str) -> bool:
        """Return True if the node is finishing its work before it leaves."""
        return node_id in self._draining

    def set_suspects(self, suspects: frozenset[str]) -> None:
        """Set the suspect nodes; they are not candidates."""
        if suspects != self._suspect:
            self._suspect = suspects
            self._changed()

    def is_suspect(self, node_id: str) -> bool:
        """Return True if the node has stopped reporting."""
        return node_id in self._suspect

    def get(self, node_id: str) -> NodeView | None:
        return self._nodes.get(node_id)

    def slot(self, node_id: str) -> int:
        """Return the node's slot, or -1 for "" and unknown nodes."""
        return self._slots.get(node_id, -1)

    def answering_slot(self, node_id: str) -> int:
        """Return the node's slot, or -1 for "", unknown and suspect nodes."""
        return -1 if node_id in self._suspect else self._slots.get(node_id, -1)

    def answering_slots(self, roster: tuple[str, ...]) -> Ints:
        """Return `answering_slot` of each node; cached for the last two tuples while no node changes."""
        for known, slots in self._rosters:
            if known is roster:
                return slots
        slots = np.array([self.answering_slot(node_id) for node_id in roster], np.int64)
        self._rosters = ((roster, slots), *self._rosters[:1])
        return slots

    def has_workers(self) -> bool:
        """Return True if any joined node serves a model."""
        return any(node.role != "pool" for node in self._nodes.values())

    def of_kind(self, node: NodeView) -> list[NodeView]:
        """Return the other nodes of the model with the same hardware and limits; [] if the hardware is unknown."""
        kind = _kind(node)
        return [other for other in self if other.node_id != node.node_id and _kind(other) == kind and node.hardware]

    def model(self, model: str) -> ModelNodes | None:
        """Return the model's candidates; None if no node, draining or suspect ones included, serves it."""
        if model not in self._models:
            nodes = [node for node in self if node.role != "pool" and node.model == model]
            if not nodes:
                return None
            idle = self._draining | self._suspect
            active = [node for node in nodes if node.node_id not in idle]
            kinds = ("prefill", "aggregated"), ("decode",)
            one = nodes[0]
            self._models[model] = ModelNodes(
                model,
                one.block_tokens,
                (
                    one.block_tokens * one.kv_bytes_per_token,
                    one.window_blocks,
                    one.block_tokens * one.window_bytes_per_token,
                ),
                *(self._candidates(among, roles) for among in (active, nodes) for roles in kinds),
            )
        return self._models[model]

    def _candidates(self, nodes: list[NodeView], roles: tuple[str, ...]) -> Candidates:
        chosen = [node for node in nodes if node.role in roles]
        return Candidates.of(
            tuple(node.node_id for node in chosen),
            tuple(node.pool_node_id for node in chosen),
            np.array([self._slots[node.node_id] for node in chosen], np.int64),
            np.array([node.capacity_tokens for node in chosen], np.int64),
            np.array([node.max_model_len or _UNLIMITED for node in chosen], np.int64),
            np.array([max(1, node.max_batch) for node in chosen], np.int64),
            np.array([node.role == "aggregated" for node in chosen], bool),
            np.array([self.answering_slot(node.pool_node_id) for node in chosen], np.int64),
        )

    def _changed(self) -> None:
        self._models.clear()
        self._rosters = ()


def _kind(node: NodeView) -> tuple[str, str, int, int]:
    """Return what nodes of equal speed have in common; tensor parallelism shows in the KV capacity."""
    return node.model, node.hardware, node.capacity_tokens, node.max_batch


def unobserved_ns(before_ns: int, now_ns: int, timeout_ns: int) -> int:
    """Return the part of the time between two events that must not count towards a time-out of `timeout_ns`.

    If two events are more than half the time-out apart, the conductor itself was stalled, and the reports that nodes
    sent meanwhile have not been read yet.
    """
    passed_ns = now_ns - before_ns
    return passed_ns if 2 * passed_ns > timeout_ns else 0


class Liveness:
    """Detection of nodes that have not reported for longer than a time-out; 0 disables it.

    Time in which the conductor itself was stalled does not count (`unobserved_ns`).
    """

    def __init__(self, timeout_ns: int) -> None:
        self._timeout_ns = timeout_ns
        self._reported_ns: dict[str, int] = {}  # time of the last report, oldest first, without suspects
        self._now_ns: int | None = None
        self.suspects: frozenset[str] = frozenset()

    def pass_time(self, now_ns: int) -> frozenset[str]:
        """Advance to `now_ns`; return the nodes that have just become suspect."""
        if not self._timeout_ns:
            return frozenset()
        unobserved = 0 if self._now_ns is None else unobserved_ns(self._now_ns, now_ns, self._timeout_ns)
        self._now_ns = now_ns
        if unobserved:
            self._reported_ns = {
                node_id: reported_ns + unobserved for node_id, reported_ns in self._reported_ns.items()
            }
        silent = []
        for node_id, reported_ns in self._reported_ns.items():
            if now_ns - reported_ns <= self._timeout_ns:
                break
            silent.append(node_id)
        for node_id in silent:
            del self._reported_ns[node_id]
        if silent:
            self.suspects |= frozenset(silent)
        return frozenset(silent)

    def mark_alive(self, node_id: str, now_ns: int) -> None:
        """Record that the node joined or reported; it is no longer suspect."""
        self.forget(node_id)
        self._reported_ns[node_id] = now_ns

    def forget(self, node_id: str) -> None:
        """Remove a node that has left."""
        self._reported_ns.pop(node_id, None)
        if node_id in self.suspects:
            self.suspects -= {node_id}
