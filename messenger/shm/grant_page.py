"""The grant page: shared memory in which an owner lists the keys that allow reading, so that reads need no request.

A key is listed by its fingerprint, a hash of all its fields: the page reveals no token, and a modified key is not
found. Fingerprints are kept in buckets of 8 words; a key whose bucket is full is not listed, and its readers send
requests.

Concurrency: one thread at a time of the owner writes (under the grant table's lock); readers in other processes take no
lock, and the owner waits for none. A token is never granted twice, so a fingerprint appears once and disappears once:

    owner     show: word = fingerprint  ........  withdraw: word = 0, fence  ..  memory may change
    reader              look up: found, copy the bytes, look up: found -> the key was valid during the whole copy

Lifetime: the page is offered as region `PAGE_ID`, once per connection. A reader's mapping outlives the owner's process,
so the reader must also check that its connection is alive after the copy.
"""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from messenger.errors import ProtocolError
from messenger.memory import PeerMemory, RemoteKey, SharedMemory

PAGE_ID = 0
"""The region id under which the page is offered; regions are numbered from 1."""
PAGE_NBYTES = 128 << 10

_PERSON = b"moonpool-grants"


def key_fingerprint(key: RemoteKey) -> int:
    """Return the 64-bit fingerprint of the key, never 0."""
    digest = hashlib.blake2b(key.pack(), digest_size=8, person=_PERSON).digest()
    return int.from_bytes(digest, "little") or 1


class GrantPage:
    """Owner's side of the page; one thread at a time."""

    def __init__(self, name: str) -> None:
        from messenger.shm.kernels import page_kernels

        self._kernels = page_kernels()
        self.memory = SharedMemory.create(PAGE_NBYTES, f"{name}-grants")
        self._words = self.memory.array.view(np.uint64)

    def show(self, key: RemoteKey) -> None:
        """List the key if it allows reading and there is room."""
        if key.read:
            self._kernels.replace(self._words, 0, key_fingerprint(key))

    def withdraw(self, key: RemoteKey) -> None:
        """Remove the key; copies that end after this returns are rejected by their readers."""
        self._kernels.replace(self._words, key_fingerprint(key), 0)

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self.memory.closed

    def close(self) -> None:
        """Withdraw every key, since readers keep their mapping, and free the page."""
        if not self.memory.closed:
            for shown in self._words[self._words != 0].tolist():
                self._kernels.replace(self._words, shown, 0)
            del self._words
            self.memory.close()


class GrantReader:
    """Caller's side, over the mapped page of one owner; any thread. Raises ProtocolError if the size is wrong."""

    def __init__(self, page: PeerMemory) -> None:
        from messenger.shm.kernels import page_kernels

        if page.nbytes != PAGE_NBYTES:
            raise ProtocolError(f"a grant page must have {PAGE_NBYTES} bytes, got {page.nbytes}")
        self._kernels: Any = page_kernels()
        self._words: npt.NDArray[np.uint64] = page.array.view(np.uint64)

    def holds(self, fingerprint: int) -> bool:
        """Return True if the key is listed now. If True before and after a copy, it was listed during all of it."""
        return bool(self._kernels.holds(self._words, fingerprint))

    def copy(
        self, fingerprint: int, fd: int, destination: int, source: int, rows: Any, to_column: int, from_column: int
    ) -> bool:
        """Copy as `messenger.shm.kernels.CopyRows`, outside the GIL.

        Returns True if the key was listed during the whole copy, and the owner, at the other end of the socket `fd`,
        was alive after it; otherwise the destination's contents are undefined. The caller must have checked the rows
        against the key's window.
        """
        return bool(
            self._kernels.copy_held(self._words, fingerprint, fd, destination, source, rows, to_column, from_column)
        )

    def copy_one(self, fingerprint: int, fd: int, destination: int, source: int, nbytes: int) -> bool:
        """Copy as `copy`, one run of bytes by its two addresses."""
        return bool(self._kernels.copy_one(self._words, fingerprint, fd, destination, source, nbytes))
