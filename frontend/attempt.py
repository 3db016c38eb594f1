"""One attempt of one request: which workers it runs on, and its tokens put in order."""

from dataclasses import dataclass, field

from frontend.inbox import AttemptFailed, Event, Inbox, TokenArrived, WorkerGone
from frontend.streams import WorkerStream
from moonpool_proto.v1 import conductor_pb2
from telemetry.tracing import OFF, Span


@dataclass(frozen=True)
class Setback:
    """Why an attempt cannot go on. `suspect` is the node that the next one avoids."""

    suspect: str
    code: str
    message: str
    retryable: bool


@dataclass
class Attempt:
    """Workers, inbox and the order of tokens. Indices count the request's tokens over all attempts."""

    number: int
    placement: conductor_pb2.Placement
    inbox: Inbox
    first_index: int
    prefill: WorkerStream | None = None
    decode: WorkerStream | None = None  # None: the prefill worker decodes too
    span: Span = OFF
    num_duplicates: int = 0
    next_index: int = field(init=False)
    _decode_spoke: bool = False
    _early: dict[int, TokenArrived] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.next_index = self.first_index

    def take(self, events: list[Event]) -> tuple[list[TokenArrived], Setback | None]:
        """The tokens that are next, in order, and what ends the attempt, if anything does.

        The first token comes from the prefill worker and later ones from the decode worker, on two connections: one may
        overtake the other.
        """
        tokens: list[TokenArrived] = []
        for event in events:
            match event:
                case TokenArrived():
                    self._decode_spoke |= self.decode is not None and event.node_id == self.decode.node_id
                    tokens.extend(self._in_order(event))
                case AttemptFailed(node_id, failure) if self._needs(node_id):
                    suspect = failure.suspect_node_id or node_id
                    return tokens, Setback(suspect, failure.code, failure.message, failure.retryable)
                case WorkerGone(node_id, reason) if self._needs(node_id):
                    return tokens, Setback(node_id, "worker_lost", reason, retryable=True)
        return tokens, None

    @property
    def decoding_node(self) -> str:
        """The node that later tokens come from."""
        placement = self.placement
        return placement.decode.node_id if placement.HasField("decode") else placement.prefill.node_id

    def incarnation_of(self, node_id: str) -> int:
        """Of a node that the placement names; 0 for others."""
        placement = self.placement
        refs = (placement.prefill, placement.decode, *(holder.pool for holder in placement.holders))
        return next((ref.incarnation for ref in refs if ref.node_id == node_id), 0)

    @property
    def streams(self) -> list[WorkerStream]:
        """The streams the attempt is on."""
        return [stream for stream in (self.prefill, self.decode) if stream is not None]

    def _in_order(self, event: TokenArrived) -> list[TokenArrived]:
        index = event.token.index
        if index < self.next_index or index in self._early:
            self.num_duplicates += 1
            return []
        self._early[index] = event
        ready: list[TokenArrived] = []
        while (token := self._early.pop(self.next_index, None)) is not None:
            ready.append(token)
            self.next_index += 1
        return ready

    def _needs(self, node_id: str) -> bool:
        """A prefill worker is done when its token is here and the decode worker, having all the KV, has spoken."""
        if self.decode is None or self.prefill is None or node_id != self.prefill.node_id:
            return True
        return not (self._decode_spoke and self.next_index > self.first_index)
