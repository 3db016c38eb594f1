"""The messages in which a part travels, alike over every transport but for its rows and the source of its bytes."""

from messenger.frames import Notify, Read, Write
from messenger.operation import Part, Transfer

__all__ = ["notify_request", "read_request", "write_request"]


def write_request(part: Part, transfer: Transfer, source_id: int, rows: bytes) -> Write:
    """`rows` and `source_id` as the transport packs them (messenger.frames)."""
    key, note = transfer.key, part.notification
    return Write(
        part.seq,
        part.operation.number,
        key.region_id,
        key.token,
        source_id,
        part.nbytes,
        rows,
        note is not None,
        b"" if note is None else note.tag,
        b"" if note is None else note.payload,
    )


def read_request(part: Part, transfer: Transfer, rows: bytes) -> Read:
    """`rows` as the transport packs them (messenger.frames)."""
    return Read(part.seq, transfer.key.region_id, transfer.key.token, part.nbytes, rows)


def notify_request(part: Part) -> Notify:
    """Of a part that moves no bytes."""
    note = part.notification
    assert note is not None
    return Notify(part.seq, note.tag, note.payload)
