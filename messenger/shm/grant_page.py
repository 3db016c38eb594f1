"""The grant page: shared memory in which an owner shows which keys may be read under, so that callers need not ask.

A key is shown by its fingerprint, a hash of all that it says, so that the page gives away no token, and a key that was
tampered with is not found. Fingerprints stand in buckets of 8 words; where there is no room, a key is not shown, and
its readers ask the owner as ever. A token is never granted twice, so a fingerprint comes once and goes once: seen after
a copy, it was there all along. The owner takes it out before it changes the memory, and waits for no reader.

The page is offered as region `PAGE_ID`, once per connection. It outlives its owner, as every mapping does: that the
owner still lives is for the reader to ask of its connection.
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


def fingerprint(key: RemoteKey) -> int:
    """The 64-bit word that stands for the key, never 0."""
    digest = hashlib.blake2b(key.pack(), digest_size=8, person=_PERSON).digest()
    return int.from_bytes(digest, "little") or 1


class GrantPage:
    """The owner's side; one thread at a time."""

    def __init__(self, name: str) -> None:
        from messenger.shm.kernels import page_kernels

        self._kernels = page_kernels()
        self.memory = SharedMemory.create(PAGE_NBYTES, f"{name}-grants")
        self._words = self.memory.array.view(np.uint64)

    def show(self, key: RemoteKey) -> None:
        """From now on readers need not ask, if there is room."""
        if key.read:
            self._kernels.replace(self._words, 0, fingerprint(key))

    def withdraw(self, key: RemoteKey) -> None:
        """When this returns, no copy that ends later is taken for good."""
        self._kernels.replace(self._words, fingerprint(key), 0)

    @property
    def closed(self) -> bool:
        return self.memory.closed

    def close(self) -> None:
        """Withdraw every key, for those who keep their mapping."""
        if not self.memory.closed:
            for shown in self._words[self._words != 0].tolist():
                self._kernels.replace(self._words, shown, 0)
            del self._words
            self.memory.close()


class GrantReader:
    """A caller's side, over the mapped page of one owner; any thread. Raises ProtocolError when it is no page."""

    def __init__(self, page: PeerMemory) -> None:
        from messenger.shm.kernels import page_kernels

        if page.nbytes != PAGE_NBYTES:
            raise ProtocolError(f"a grant page has {PAGE_NBYTES} bytes, not {page.nbytes}")
        self._kernels: Any = page_kernels()
        self._words: npt.NDArray[np.uint64] = page.array.view(np.uint64)

    def holds(self, print_: int) -> bool:
        """Whether the key of this fingerprint is good; asked after a copy, that it was good all along."""
        return bool(self._kernels.holds(self._words, print_))

    def copy(
        self, print_: int, fd: int, destination: int, source: int, rows: Any, to_column: int, from_column: int
    ) -> bool:
        """As `messenger.shm.kernels.CopyRows`, outside the GIL: True when the key was good before and after the copy.

        And the owner, at the other end of the socket `fd`, was there after it. The caller has checked the rows against
        the key's window. After False the destination holds anything.
        """
        return bool(self._kernels.copy_held(self._words, print_, fd, destination, source, rows, to_column, from_column))

    def copy_one(self, print_: int, fd: int, destination: int, source: int, nbytes: int) -> bool:
        """As `copy`, of one run of bytes by its two addresses."""
        return bool(self._kernels.copy_one(self._words, print_, fd, destination, source, nbytes))
