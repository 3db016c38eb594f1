"""Credits limit how many frames a peer may have under way to this process's inbox, so that the inbox is never full.

A frame uses a receive request of the shared receive queue and a place in the inbox; without one it breaks the queue
pair or stalls every peer. So nothing is sent without a credit. Credits are cumulative: the inbox's owner sends a
*limit*, the number of frames that this peer may have sent since the connection began. A lost, late or repeated limit
does no harm; it travels in any frame of the other direction.

Deadlock freedom: the last credit is reserved for frames that carry only a limit. Two sides without credits for frames
can thus each still send one such frame, and `owes` does not answer a bare limit with a bare limit for ever: one is due
only when half of the share was freed since the last one. Shares are fixed, one per peer, and never lent: an idle peer
finds its share whatever the others do.
"""

from dataclasses import dataclass
from typing import Final

from messenger.errors import MessengerError
from rpc.errors import InvalidArgument

LEAST_SHARE: Final = 4
WIRE_BITS: Final = 32


class InboxFull(MessengerError):
    """All shares of the shared receive queue are allocated."""


class SendCredits:
    """Frames that this side may still send to one peer over one connection."""

    def __init__(self, share: int) -> None:
        """`share` is the number the peer granted in the handshake. Raises InvalidArgument below LEAST_SHARE."""
        if share < LEAST_SHARE:
            raise InvalidArgument(f"a share of {share} credits is too small: at least {LEAST_SHARE} are needed")
        self._share = share
        self._limit = share
        self._sent = 0

    @property
    def available(self) -> int:
        """Frames that may be sent now, without the credit reserved for a bare limit."""
        return max(0, self._limit - self._sent - 1)

    def try_take(self) -> bool:
        """Use a credit for a frame; return False if there is none."""
        if self._limit - self._sent < 2:
            return False
        self._sent += 1
        return True

    def try_take_last(self) -> bool:
        """Use a credit, the reserved one included, for a frame that carries only a limit."""
        if self._limit == self._sent:
            return False
        self._sent += 1
        return True

    def told(self, wire_limit: int) -> bool:
        """Apply a limit of the peer (its low WIRE_BITS bits); return True if frames may be sent now that could not
        before.

        Raises InvalidArgument for a limit that grants more than the share.
        """
        limit = unwrapped(self._limit, wire_limit)
        if limit > self._sent + self._share:
            raise InvalidArgument(f"a peer allows {limit - self._sent} frames where its share is {self._share}")
        had = self.available
        self._limit = max(self._limit, limit)
        return had == 0 and self.available > 0


class ReceiveCredits:
    """Frames that one peer may send to this side's inbox over one connection."""

    def __init__(self, share: int) -> None:
        """`share` is the number that this side granted in the handshake. Raises InvalidArgument below LEAST_SHARE."""
        if share < LEAST_SHARE:
            raise InvalidArgument(f"a share of {share} credits is too small: at least {LEAST_SHARE} are needed")
        self._share = share
        self._received = 0
        self._freed = 0
        self._told_limit = share

    @property
    def held(self) -> int:
        """Received frames whose places are not free yet."""
        return self._received - self._freed

    def received(self) -> None:
        """Count a frame. Raises InvalidArgument when the peer had no credit for it, a protocol violation."""
        if self._received == self._told_limit:
            raise InvalidArgument(f"a peer sent more than its share of {self._share} frames")
        self._received += 1

    def freed(self, frames: int = 1) -> None:
        """Count places of the inbox that are free again, with their receive requests posted again."""
        if not 0 <= frames <= self.held:
            raise InvalidArgument(f"{frames} places cannot be freed of {self.held} that are held")
        self._freed += frames

    @property
    def owes(self) -> bool:
        """Return True if a limit should be sent now, in a frame of its own if no other is sent."""
        return 2 * (self._limit - self._told_limit) >= self._share

    def tell(self) -> int:
        """Return the limit for the frame that is sent now, its low WIRE_BITS bits; it counts as sent."""
        self._told_limit = self._limit
        return self._told_limit % (1 << WIRE_BITS)

    @property
    def _limit(self) -> int:
        return self._freed + self._share


@dataclass
class InboxShares:
    """Allocation of a shared receive queue to connections: `total` places, `share` for each."""

    total: int
    share: int

    def __post_init__(self) -> None:
        if not LEAST_SHARE <= self.share <= self.total:
            raise InvalidArgument(
                f"shares of {self.share} of {self.total} receive requests: expected {LEAST_SHARE} to {self.total}"
            )
        self._members: set[int] = set()

    @property
    def num_members(self) -> int:
        return len(self._members)

    @property
    def most_members(self) -> int:
        return self.total // self.share

    def join(self, connection: int) -> int:
        """Allocate a share to a connection. Raises InboxFull when none is left, InvalidArgument when it has one."""
        if connection in self._members:
            raise InvalidArgument(f"connection {connection} has its share of the inbox already")
        if len(self._members) >= self.most_members:
            raise InboxFull(
                f"all {self.most_members} shares of the inbox are given ({self.total} receive requests, {self.share} "
                "each): raise the number of receive requests, or use tcp towards more peers"
            )
        self._members.add(connection)
        return self.share

    def leave(self, connection: int) -> None:
        """Release the share of a connection whose queue pair is gone. Repeated calls are allowed."""
        self._members.discard(connection)


def unwrapped(reference: int, low_bits: int) -> int:
    """Return the number nearest to `reference` >= 0 that has these low WIRE_BITS bits."""
    modulus = 1 << WIRE_BITS
    return max(reference + (low_bits - reference + modulus // 2) % modulus - modulus // 2, low_bits % modulus)
