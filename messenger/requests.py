"""The frames in which a part travels, alike over every transport but for its rows and the source of its bytes."""

from messenger.frames import Frame, pack_notify, pack_read, pack_write
from messenger.operation import Part, Transfer

__all__ = ["notify_request", "read_request", "write_request"]


def write_request(part: Part, transfer: Transfer, source_id: int, rows: bytes) -> Frame:
    """`rows` and `source_id` as the transport packs them (messenger.frames)."""
    key, note = transfer.key, part.notification
    tag, payload = (b"", b"") if note is None else note
    has_note, number = note is not None, part.operation.number
    return pack_write(part.seq, number, key.region_id, key.token, source_id, part.nbytes, rows, has_note, tag, payload)


def read_request(part: Part, transfer: Transfer, rows: bytes) -> Frame:
    """`rows` as the transport packs them (messenger.frames)."""
    return pack_read(part.seq, transfer.key.region_id, transfer.key.token, part.nbytes, rows)


def notify_request(part: Part) -> Frame:
    """Of a part that moves no bytes."""
    note = part.notification
    assert note is not None
    return pack_notify(part.seq, note.tag, note.payload)
