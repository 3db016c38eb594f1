"""What all who show certificates from files need: whether the files changed, and a handshake with oneself."""

import contextlib
import ssl
from pathlib import Path
from typing import Final

__all__ = ["certificate_end_s", "file_mark", "shake_hands"]

_MAX_STEPS: Final = 32


def file_mark(path: Path) -> tuple[int, ...]:
    """Another one when the file may hold something else; () while there is none."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None = None) -> ssl.SSLObject:
    """The client's side of a connection between the two, to whom the server is `name`. Raises what ssl raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = client.wrap_bio(to_client, to_server, server_hostname=name)
    owner = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (caller, owner) * _MAX_STEPS:
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return caller


def certificate_end_s(connection: ssl.SSLObject) -> float:
    """When the other side's certificate, which was verified, ends: seconds since the epoch."""
    return float(ssl.cert_time_to_seconds(str((connection.getpeercert() or {})["notAfter"])))
