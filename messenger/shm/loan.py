"""Bytes of a peer's memory, lent in place: nothing is copied, and what was read is confirmed afterwards."""

from collections.abc import Callable

from messenger.memory import Bytes

__all__ = ["Loan"]


class Loan:
    """`array`: uint8, read-only, in the owner's own memory; it may change under the reader once the key is revoked.

    The owner waits for no borrower. So: read, then `confirm`, and only then use what was read.
    """

    def __init__(self, array: Bytes, is_good: Callable[[], bool]) -> None:
        self.array = array
        self._is_good = is_good

    def confirm(self) -> bool:
        """Whether the key was good, and the connection to its owner alive, from the borrowing until now.

        False: forget what was read. It never becomes true again.
        """
        return self._is_good()
