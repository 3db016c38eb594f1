"""Prefill group in virtual time: one prompt's chunks in a pipeline over the members' layers (docs/prefill-groups.md).

Chunks are assigned as on the live nodes (`prefill_node.chunk_assignment`). A layer of a chunk needs the same layer of
all earlier chunks, whose KV is sent to the members that need it while the next layer is computed. All layers of a chunk
take equally long, so it suffices to track the arrival of the first and the last layer.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from prefill_node.chunk_assignment import MIN_CHUNKS, TokenSpan, assign_chunks
from simulator.serving.clock import NS, SimulatedLink, VirtualClock, send
from simulator.serving.requests import SimulatedRequest
from simulator.serving.settings import ActualCosts, ServingSettings


class SimulatedMember(Protocol):
    """Interface of a prefill node to its group."""

    node_id: str
    out: SimulatedLink
    into: SimulatedLink

    def enlist(self, group: "SimulatedGroup", number: int) -> None:
        """Enqueue the chunk; it runs as soon as its predecessor has started."""

    def wake(self) -> None:
        """Start a step; one of the node's chunks may begin now."""


class SimulatedGroup:
    """Prompt computed by several nodes, which call `may_begin`, `begin` when their engine is idle, and `ended`."""

    def __init__(
        self,
        work: SimulatedRequest,
        chunks: Sequence[tuple[SimulatedMember, TokenSpan]],
        clock: VirtualClock,
        truth: ActualCosts,
        settings: ServingSettings,
        pushed: Callable[[TokenSpan, int], None],
    ) -> None:
        """`chunks`: in the prompt's order; the last belongs to the head. `pushed(span, ready_ns)` is called for each
        chunk with the time at which the head has its KV and can send it on."""
        self.work = work
        self._chunks = chunks
        self._clock = clock
        self._truth = truth
        self._layers = settings.layers
        self._pushed = pushed
        self._next = 0  # index of the chunk that begins next
        asked_ns = clock.now_ns + 2 * round(settings.network_s * NS)
        # By member: arrival times of the first and the last layer of all KV computed so far.
        self._first_ns = {member.node_id: asked_ns for member, _ in chunks}
        self._last_ns = dict(self._first_ns)
        self._share(asked_ns, asked_ns, 0, self._head, (0, work.reused_tokens))
        for number, (member, _) in enumerate(chunks):
            member.enlist(self, number)
        self._wake_next()

    @property
    def _head(self) -> SimulatedMember:
        return self._chunks[-1][0]

    def may_begin(self, number: int) -> bool:
        """Return True if the previous chunk has begun and its first layer has arrived."""
        return number == self._next and self._clock.now_ns >= self._first_ns[self._chunks[number][0].node_id]

    def begin(self, number: int) -> int:
        """Start computing the chunk and return the time of its end."""
        member, (start, end) = self._chunks[number]
        now_ns = self._clock.now_ns
        alone_ns = max(1, round(self._truth.chunk_s(member.node_id, self.work, start, end) * NS))
        layer_ns = alone_ns // self._layers
        end_ns = max(now_ns + alone_ns, self._last_ns[member.node_id] + layer_ns)
        self._next += 1
        self._share(now_ns, end_ns, layer_ns, member, (start, end))
        self._pushed((start, end), max(end_ns, self._last_ns[self._head.node_id]))
        self._wake_next()
        return end_ns

    def ended(self, number: int) -> bool:
        """Record that the chunk is computed; return True if it was the last."""
        self.work.computed = self._chunks[number][1][1]
        return number == len(self._chunks) - 1

    def _share(self, begin_ns: int, end_ns: int, layer_ns: int, member: SimulatedMember, span: TokenSpan) -> None:
        """Send KV that the member computes from `begin_ns` to `end_ns`, layer by layer, to the members that need it."""
        self._first_ns[member.node_id] = max(self._first_ns[member.node_id], begin_ns + layer_ns)
        self._last_ns[member.node_id] = max(self._last_ns[member.node_id], end_ns)
        nbytes = (span[1] - span[0]) * (
            self._truth.profile.kv_bytes_per_token + self._truth.profile.window_bytes_per_token
        )
        needing = {other.node_id: other for other, _ in self._chunks[self._next :]}
        for other in needing.values():
            if other is member or not nbytes:
                continue
            alone_ns = self._truth.transfer_ns("push", nbytes)
            sent_ns = send(begin_ns, (member.out, other.into), alone_ns)
            part_ns = alone_ns // self._layers
            first_ns = max(begin_ns + layer_ns, sent_ns - alone_ns) + part_ns
            self._first_ns[other.node_id] = max(self._first_ns[other.node_id], first_ns)
            self._last_ns[other.node_id] = max(self._last_ns[other.node_id], sent_ns, end_ns + part_ns)

    def _wake_next(self) -> None:
        if self._next < len(self._chunks):
            member = self._chunks[self._next][0]
            self._clock.at(max(self._clock.now_ns, self._first_ns[member.node_id]), member.wake)


def form(
    work: SimulatedRequest, members: Sequence[SimulatedMember], settings: ServingSettings, block_tokens: int
) -> list[tuple[SimulatedMember, TokenSpan]]:
    """Assign chunks to members, in the prompt's order; [] if sharing does not pay. The head is the first member."""
    parts = assign_chunks(
        work.reused_tokens,
        work.job.prompt_tokens,
        chunk_tokens=settings.chunk_tokens,
        block_tokens=block_tokens,
        members=len(members),
    )
    chunks = [(member, span) for member, spans in zip(members, parts, strict=True) for span in spans]
    return sorted(chunks, key=lambda chunk: chunk[1]) if len(chunks) >= MIN_CHUNKS else []
