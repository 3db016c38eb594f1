"""Owner's side of rdma: opens windows to its regions, and settles and acknowledges what callers move through them."""

import numpy as np

from messenger.errors import ProtocolError
from messenger.frames import MAX_PART_NBYTES, KeyInfo, KeyQuery, Read, Write
from messenger.grants import Access
from messenger.memory import AnyRegion, GpuRegion
from messenger.rdma.link import RdmaLink
from messenger.rdma.verbs import abi
from messenger.rdma.windows import Window
from messenger.slices import Rows
from messenger.transport import Responder


class RdmaResponder(Responder):
    _link: RdmaLink
    reaches_gpus = True

    def __init__(self, link: RdmaLink) -> None:
        super().__init__(link)
        self._windows: dict[int, Window] = {}
        self._generation = link.generation

    def target_rows(self, message: Write) -> Rows:
        return _extent(message)

    def source_rows(self, message: Read) -> Rows:
        return _extent(message)

    def land(self, message: Write, rows: Rows, region: AnyRegion) -> None:
        if not message.source_id:
            raise ProtocolError("received a write under a valid key without moved bytes")
        self._link.lanes[0].device.settle(region)

    def skip(self, message: Write) -> None:
        """Skip nothing: the frame carries no bytes."""

    def serve(self, message: Read, rows: Rows, region: AnyRegion) -> None:
        raise ProtocolError("received a read under a valid key, which needs no request")

    def key_queried(self, query: KeyQuery, access: Access, last_seq: int) -> None:
        key, region = access.key, access.region
        if self._generation != self._link.generation:
            # These windows lack a rebuilt lane. They stay open for work in flight on the other lanes.
            self._generation = self._link.generation
            self._windows.clear()
        window = self._windows.get(query.token)
        trouble, address = "", 0
        try:
            registered = [lane.device.register(region) for lane in self._link.lanes]
        except OSError as error:
            trouble = str(error)
        else:
            address = registered[0].first_address
            if window is None:
                rights = abi.ACCESS_REMOTE_READ * key.read | abi.ACCESS_REMOTE_WRITE * key.write
                mrs = [one.mr for one in registered]
                window = self._link.bind(mrs, address + key.offset, key.nbytes, rights)
                access.keep(window)
                window.on_closed = lambda: self._link.send_soon(_nothing(query, 0))
                self._forget_closed()
                self._windows[query.token] = window
        self._link.send(
            KeyInfo(
                region_id=query.region_id,
                token=query.token,
                last_seq=last_seq,
                address=address,
                offset=key.offset,
                nbytes=key.nbytes,
                read=key.read,
                write=key.write,
                rkeys=np.array(window.rkeys if window is not None else [], dtype="<u4").tobytes(),
                trouble=trouble,
                settles=isinstance(region, GpuRegion),
            )
        )

    def key_void(self, query: KeyQuery, last_seq: int) -> None:
        self._link.send(_nothing(query, last_seq))

    def _forget_closed(self) -> None:
        for token in [token for token, window in self._windows.items() if window.is_closed]:
            del self._windows[token]


def _nothing(query: KeyQuery, last_seq: int) -> KeyInfo:
    """Return the reply for a void key."""
    rights = {"read": False, "write": False}
    return KeyInfo(query.region_id, query.token, last_seq, 0, 0, 0, **rights, rkeys=b"", trouble="", settles=False)


def _extent(message: Write | Read) -> Rows:
    """Return the range that contains all slices, int64 [1, 2]: (first byte, number of bytes up to the last)."""
    rows: Rows = np.frombuffer(message.rows, dtype="<i8").reshape(-1, 2) if len(message.rows) == 16 else _NONE
    if not len(rows) or not 0 <= message.nbytes <= MAX_PART_NBYTES or int(rows[0, 1]) < 1:
        raise ProtocolError("a transfer has an invalid extent")
    return rows


_NONE: Rows = np.empty((0, 2), dtype=np.int64)
