"""Caller's side of rdma: obtains access once per key, then moves bytes itself and notifies the owner if needed.

An access is the owner's reply to KeyQuery: the region's address and a window key for each rail. With it, bytes move
without the owner's processor; the adapters' acknowledgement is the answer. A frame is sent to the owner for a
notification, for work that must precede the visibility of the bytes, and if the key does not allow the request: then no
bytes are moved, and the owner refuses the request. A write that the owner is known to have received (a later request
was done, and its answer was lost with an earlier connection) is not repeated, because the memory may be in other use by
now: the access states the number up to which that holds.

Threads and locks: the sending thread appends to `_unanswered`, the receiving one consumes it and alone uses `_early`
(see `messenger.transport`). `_lock` guards changes of `_accesses`; single look-ups take none. The sending thread sets
`_asked` before it sends a query, the receiving one clears it with the answer. Answers are returned in the order of the
requests.
"""

import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from messenger.errors import ProtocolError
from messenger.frames import Ack, Frame, KeyInfo, KeyQuery, Message, Refused
from messenger.memory import RemoteKey
from messenger.operation import Kind, Part, Transfer
from messenger.rdma.connection_io import Movement
from messenger.rdma.link import RdmaLink
from messenger.rdma.verbs import abi
from messenger.slices import REMOTE
from messenger.transport import WHOLE, Requester, SendStatus, notify_request, read_request, write_request

MAX_ACCESSES = 4096
QUICK_ROWS = 256

_ANSWERS = Ack, Refused
_EXTENT = struct.Struct("<qq")
"""(first byte, number of bytes up to the last) of the range that contains all slices."""


@dataclass(frozen=True, eq=False, slots=True)
class _Request:
    """A request in flight. `movement` is None if no bytes move; with `has_frame`, the owner must answer a frame."""

    seq: int
    nbytes: int
    movement: Movement | None
    has_frame: bool

    @property
    def is_moved(self) -> bool:
        """True if the request's bytes have moved and no answer of the owner is expected."""
        return not self.has_frame and self.movement is not None and not self.movement.left_nbytes


class RdmaRequester(Requester):
    _link: RdmaLink

    def __init__(self, link: RdmaLink, give_up: Callable[[str], None]) -> None:
        """Serve `link`. `give_up(reason)` is called if rdma cannot use the memory of one of the sides."""
        super().__init__(link)
        self._give_up = give_up
        self._lock = threading.Lock()
        self._accesses: OrderedDict[tuple[int, int], KeyInfo] = OrderedDict()
        self._generation = link.generation
        self._asked: tuple[int, int] | None = None
        self._answers: list[KeyInfo] = []
        self._unanswered: deque[_Request] = deque()
        self._early: Message | None = None  # an answer received before the completions of requests before it

    def begin(self, part: Part) -> SendStatus:
        return WHOLE if self._link.has_room() and self._sent_at_once(part) else super().begin(part)

    def send(self, part: Part) -> SendStatus:
        if part.transfer is not None:
            return super().send(part)
        self._move(part, None, notify_request(part))
        return WHOLE

    def receive(self, reads: bool) -> Message:
        while (answer := self.try_receive()) is None:
            if self._early is not None:
                self._await_next()
                continue
            message = self._link.receive_unless(self._is_next_moved)
            if isinstance(message, _ANSWERS):
                self._early = message
            elif message is not None:
                return message
        return answer

    def try_receive(self) -> Message | None:
        request = self._unanswered[0] if self._unanswered else None
        if request is not None and not request.has_frame:
            return Ack(request.seq, request.nbytes) if request.is_moved else None
        if self._early is None:
            return self._link.try_receive()
        answer, self._early = self._early, None
        return answer

    def accept(self, part: Part, ack: Ack) -> bool:
        has_moved = self._answered()
        if part.transfer is not None and part.operation.kind is Kind.READ:
            if not has_moved:
                raise ProtocolError(f"{self._link.address} acknowledged a read of which nothing was read")
            self._link.lanes[0].device.settle(part.transfer.region)
        if ack.nbytes != part.nbytes:
            raise ProtocolError(f"{self._link.address} acknowledged {ack.nbytes} bytes of {part.nbytes}")
        return True

    def refused(self, part: Part) -> None:
        self._answered()
        if part.transfer is not None:
            with self._lock:
                self._accesses.pop((part.transfer.key.region_id, part.transfer.key.token), None)

    def key_info(self, info: KeyInfo) -> None:
        if info.rkeys and len(info.rkeys) != 4 * len(self._link.lanes):
            raise ProtocolError(f"{self._link.address} sent keys for another number of rails")
        name = info.region_id, info.token
        with self._lock:
            if name == self._asked:
                self._asked = None
                self._answers.append(info)
            elif not info.rkeys:
                self._accesses.pop(name, None)  # withdrawn
                return
            self._accesses[name] = info
            if len(self._accesses) > MAX_ACCESSES:
                self._accesses.popitem(last=False)
        self._link.wake()

    def _sent_at_once(self, part: Part) -> bool:
        """Send the request if that takes microseconds and cannot block. Returns False if it may take longer."""
        transfer = part.transfer
        if transfer is None:
            self.send(part)
            return True
        access = self._accesses.get((transfer.key.region_id, transfer.key.token))
        if access is None or access.trouble or self._generation != self._link.generation:
            return False
        if len(transfer.slices) > QUICK_ROWS:
            return False
        moves = self._reads if part.operation.kind is Kind.READ else self._writes
        return moves(part, transfer, access)

    def _send_write(self, part: Part, transfer: Transfer) -> None:
        while not self._writes(part, transfer, self._access(transfer.key)):
            continue  # the access is outdated and must be queried again

    def _send_read(self, part: Part, transfer: Transfer) -> None:
        while not self._reads(part, transfer, self._access(transfer.key)):
            continue  # the access is outdated and must be queried again

    def _writes(self, part: Part, transfer: Transfer, access: KeyInfo) -> bool:
        start, end = transfer.slices.extent(REMOTE)
        is_allowed = access.write and _covers(access, start, end) and part.seq > access.last_seq
        movement = self._movement(transfer, access, abi.WR_RDMA_WRITE) if is_allowed and part.nbytes else None
        if movement is not None and part.notification is None and not access.settles:
            return self._move(part, movement, None)
        # A part that moves nothing, after all others of its write, has an extent of one byte: none is invalid.
        extent = _EXTENT.pack(start, max(1, end - start))
        return self._move(part, movement, write_request(part, transfer, int(is_allowed), extent))

    def _reads(self, part: Part, transfer: Transfer, access: KeyInfo) -> bool:
        start, end = transfer.slices.extent(REMOTE)
        is_allowed = access.read and _covers(access, start, end)
        if is_allowed:
            return self._move(part, self._movement(transfer, access, abi.WR_RDMA_READ), None)
        return self._move(part, None, read_request(part, transfer, _EXTENT.pack(start, end - start)))

    def _move(self, part: Part, movement: Movement | None, message: Frame | None) -> bool:
        """Start the movement. Returns False if lanes were rebuilt after the owner sent the keys."""
        self._unanswered.append(_Request(part.seq, part.nbytes, movement, message is not None))
        if self._link.move(movement, message):
            return True
        self._unanswered.pop()
        return False

    def _answered(self) -> bool:
        """Finish the oldest request, so that its local memory is free. Returns True if its bytes were moved."""
        if not self._unanswered:
            raise ProtocolError(f"{self._link.address} answered a request that was not sent")
        movement = self._unanswered.popleft().movement
        if movement is not None:
            self._link.finish(movement)
        return movement is not None

    def _await_next(self) -> None:
        """Wait for the oldest movement, which precedes the answered request and whose completion comes later."""
        movement = self._unanswered[0].movement
        assert movement is not None
        self._link.finish(movement)

    def _is_next_moved(self) -> bool:
        return bool(self._unanswered) and self._unanswered[0].is_moved

    def _movement(self, transfer: Transfer, access: KeyInfo, opcode: int) -> Movement:
        try:
            registrations = [lane.device.register(transfer.region) for lane in self._link.lanes]
        except OSError as error:
            self._give_up(str(error))
            raise
        rkeys = struct.unpack(f"<{len(registrations)}I", access.rkeys)
        return Movement(
            rows=transfer.rows,
            nbytes=transfer.nbytes,
            opcode=opcode,
            local_address=registrations[0].first_address,
            remote_address=access.address,
            keys=[(one.lkey, rkey) for one, rkey in zip(registrations, rkeys, strict=True)],
            generation=self._generation,
            held=registrations,
        )

    def _access(self, key: RemoteKey) -> KeyInfo:
        """Return the access under the key, queried from the owner at its first use. Raises OSError if the link ends."""
        name = key.region_id, key.token
        if self._generation != self._link.generation:
            with self._lock:
                self._generation = self._link.generation
                self._accesses.clear()
        access = self._accesses.get(name)
        if access is None:
            # The owner may withdraw the access right after granting it: use the answer all the same.
            self._asked, self._answers = name, []
            self._link.send(KeyQuery(*name))
            self._link.wait_for(lambda: bool(self._answers))
            access = self._answers[0]
        if access.trouble:
            self._give_up(access.trouble)
            raise OSError(f"{self._link.address} cannot grant access: {access.trouble}")
        return access


def _covers(access: KeyInfo, start: int, end: int) -> bool:
    """Return True if the key covers [start, end), which contains all slices; the hardware checks each slice."""
    return access.offset <= start and end <= access.offset + access.nbytes
