"""The caller's side of rdma: asks for access once, then moves bytes itself and tells the owner.

An access is the owner's answer to Ask: where its region is, and a window's key for each rail. What the key does not
allow is not tried: the frame goes alone, and the owner refuses it by name. A write that the owner has done already (the
answer was lost with an earlier connection) is not done again either, since the memory may be something else's by now:
the access tells the number up to which that is so.
"""

import struct
import threading
from collections import OrderedDict
from collections.abc import Callable

from messenger.errors import ProtocolError
from messenger.frames import Ack, Allow, Ask, Frame
from messenger.keys import RemoteKey
from messenger.operation import Kind, Part, Transfer
from messenger.rdma.courier import Movement
from messenger.rdma.link import RdmaLink
from messenger.rdma.verbs import abi
from messenger.requests import read_request, write_request
from messenger.slices import REMOTE
from messenger.transport import WHOLE, Requester, Sent

MAX_ACCESSES = 4096
QUICK_ROWS = 256

_EXTENT = struct.Struct("<qq")
"""(first byte, how many up to the last), within which all slices lie."""


class RdmaRequester(Requester):
    _link: RdmaLink

    def __init__(self, link: RdmaLink, give_up: Callable[[str], None]) -> None:
        """`give_up(reason)` is called when memory of either side cannot be used by rdma."""
        super().__init__(link)
        self._give_up = give_up
        self._lock = threading.Lock()
        self._accesses: OrderedDict[tuple[int, int], Allow] = OrderedDict()
        self._generation = link.generation
        self._asked: tuple[int, int] | None = None
        self._answers: list[Allow] = []
        self._movements: dict[int, Movement] = {}

    def begin(self, part: Part) -> Sent:
        return WHOLE if self._link.has_room() and self._sent_at_once(part) else super().begin(part)

    def accept(self, part: Part, ack: Ack) -> bool:
        movement = self._movements.pop(part.seq, None)
        if movement is not None:
            self._link.finish(movement)
            if part.operation.kind is Kind.READ and part.transfer is not None:
                self._link.lanes[0].device.settle(part.transfer.region)
        elif part.transfer is not None and part.operation.kind is Kind.READ:
            raise ProtocolError(f"{self._link.address} allows a read of which nothing was read")
        if ack.nbytes != part.nbytes:
            raise ProtocolError(f"{self._link.address} acknowledges {ack.nbytes} bytes of {part.nbytes}")
        return True

    def refused(self, part: Part) -> None:
        movement = self._movements.pop(part.seq, None)
        if movement is not None:
            self._link.finish(movement)
        if part.transfer is not None:
            with self._lock:
                self._accesses.pop((part.transfer.key.region_id, part.transfer.key.token), None)

    def allowed(self, allow: Allow) -> None:
        if allow.rkeys and len(allow.rkeys) != 4 * len(self._link.lanes):
            raise ProtocolError(f"{self._link.address} allows access on other rails than there are")
        name = allow.region_id, allow.token
        with self._lock:
            if name == self._asked:
                self._asked = None
                self._answers.append(allow)
            elif not allow.rkeys:
                self._accesses.pop(name, None)  # withdrawn
                return
            self._accesses[name] = allow
            if len(self._accesses) > MAX_ACCESSES:
                self._accesses.popitem(last=False)
        self._link.wake()

    def _sent_at_once(self, part: Part) -> bool:
        """Send it where that takes microseconds and cannot block."""
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
            continue  # it is to be asked again

    def _send_read(self, part: Part, transfer: Transfer) -> None:
        while not self._reads(part, transfer, self._access(transfer.key)):
            continue  # it is to be asked again

    def _writes(self, part: Part, transfer: Transfer, access: Allow) -> bool:
        start, end = transfer.slices.extent(REMOTE)
        is_allowed = access.write and _covers(access, start, end) and part.seq > access.last_seq
        movement = self._movement(transfer, access, abi.WR_RDMA_WRITE) if is_allowed else None
        source_id = int(movement is not None)
        return self._move(part, movement, write_request(part, transfer, source_id, _EXTENT.pack(start, end - start)))

    def _reads(self, part: Part, transfer: Transfer, access: Allow) -> bool:
        start, end = transfer.slices.extent(REMOTE)
        is_allowed = access.read and _covers(access, start, end)
        movement = self._movement(transfer, access, abi.WR_RDMA_READ) if is_allowed else None
        return self._move(part, movement, read_request(part, transfer, _EXTENT.pack(start, end - start)))

    def _move(self, part: Part, movement: Movement | None, message: Frame) -> bool:
        """False: lanes were built anew since the owner told the keys."""
        if movement is not None:
            self._movements[part.seq] = movement
        if self._link.move(movement, message):
            return True
        self._movements.pop(part.seq, None)
        return False

    def _movement(self, transfer: Transfer, access: Allow, opcode: int) -> Movement:
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

    def _access(self, key: RemoteKey) -> Allow:
        """What the owner allows under the key; asks it at the first use. Raises OSError when the link ended first."""
        name = key.region_id, key.token
        if self._generation != self._link.generation:
            with self._lock:
                self._generation = self._link.generation
                self._accesses.clear()
        access = self._accesses.get(name)
        if access is None:
            # It may be withdrawn as soon as it is given: the answer is taken, whatever came after it.
            self._asked, self._answers = name, []
            self._link.send(Ask(*name))
            self._link.wait_for(lambda: bool(self._answers))
            access = self._answers[0]
        if access.trouble:
            self._give_up(access.trouble)
            raise OSError(f"{self._link.address} cannot give access: {access.trouble}")
        return access


def _covers(access: Allow, start: int, end: int) -> bool:
    """Whether the key is for [start, end), from the first byte touched to the last; the hardware checks each slice."""
    return access.offset <= start and end <= access.offset + access.nbytes
