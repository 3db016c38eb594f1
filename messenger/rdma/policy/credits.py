"""Credits, which limit the frames that a peer may have in flight to this process's inbox, so that it is never full.

A frame uses a receive request of the shared receive queue and a slot in the inbox; without them it breaks the queue
pair or stalls every peer. So nothing is sent without a credit. Credits are cumulative: the inbox's owner sends a
*limit*, the number of frames that this peer may have sent since the connection began. A lost, late or repeated limit
does no harm; every frame of the other direction carries one.

Deadlock freedom: the last credit is reserved for frames that carry only a limit. So two sides without credits for
frames can each still send one such frame. They do not answer bare limits with bare limits indefinitely, because one is
due (`owes`) only after half of the share was freed since the last one. Shares are fixed, one per connection, and never
lent, so that an idle peer always has its share.
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
    """Credits for frames from this side to one peer over one connection."""

    def __init__(self, share: int) -> None:
        """Start with the `share` of the peer's inbox. Raises InvalidArgument below LEAST_SHARE."""
        if share < LEAST_SHARE:
            raise InvalidArgument(f"a share of {share} credits is too small: at least {LEAST_SHARE} are needed")
        self._share = share
        self._limit = share
        self._sent = 0

    @property
    def available(self) -> int:
        """Number of frames that may be sent now, without the credit reserved for a bare limit."""
        return max(0, self._limit - self._sent - 1)

    def try_take(self) -> bool:
        """Use a credit for a frame. Returns False if there is none."""
        if self._limit - self._sent < 2:
            return False
        self._sent += 1
        return True

    def try_take_last(self) -> bool:
        """Use a credit, possibly the reserved one, for a frame with only a limit. Returns False if there is none."""
        if self._limit == self._sent:
            return False
        self._sent += 1
        return True

    def apply_limit(self, wire_limit: int) -> bool:
        """Apply a limit of the peer (its low WIRE_BITS bits). Returns True if frames were blocked and are not now.

        Raises InvalidArgument for a limit that grants more than the share.
        """
        limit = unwrapped(self._limit, wire_limit)
        if limit > self._sent + self._share:
            raise InvalidArgument(f"a peer grants {limit - self._sent} frames, but the share is {self._share}")
        had = self.available
        self._limit = max(self._limit, limit)
        return had == 0 and self.available > 0


class ReceiveCredits:
    """Credits for frames from one peer to this side's inbox over one connection."""

    def __init__(self, share: int) -> None:
        """Start with the peer's `share` of this side's inbox. Raises InvalidArgument below LEAST_SHARE."""
        if share < LEAST_SHARE:
            raise InvalidArgument(f"a share of {share} credits is too small: at least {LEAST_SHARE} are needed")
        self._share = share
        self._received = 0
        self._freed = 0
        self._sent_limit = share

    @property
    def held(self) -> int:
        """Number of received frames whose slots are not free yet."""
        return self._received - self._freed

    def received(self) -> None:
        """Count a frame. Raises InvalidArgument if the peer had no credit for it, which violates the protocol."""
        if self._received == self._sent_limit:
            raise InvalidArgument(f"a peer sent more than its share of {self._share} frames")
        self._received += 1

    def freed(self, frames: int = 1) -> None:
        """Count slots of the inbox that are free again, with their receive requests posted again."""
        if not 0 <= frames <= self.held:
            raise InvalidArgument(f"cannot free {frames} slots: {self.held} are in use")
        self._freed += frames

    @property
    def owes(self) -> bool:
        """True if a limit should be sent now, in a frame of its own if there is no other."""
        return 2 * (self._limit - self._sent_limit) >= self._share

    def take_limit(self) -> int:
        """Return the low WIRE_BITS bits of the limit for the frame to send now, and record it as sent."""
        self._sent_limit = self._limit
        return self._sent_limit % (1 << WIRE_BITS)

    @property
    def _limit(self) -> int:
        return self._freed + self._share


@dataclass
class InboxShares:
    """Allocation of a shared receive queue of `total` requests to connections, `share` for each."""

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
        """Allocate a share to a connection. Raises InboxFull if none is left, InvalidArgument if it has one already."""
        if connection in self._members:
            raise InvalidArgument(f"connection {connection} has its share of the inbox already")
        if len(self._members) >= self.most_members:
            raise InboxFull(
                f"all {self.most_members} shares of the inbox are in use ({self.total} receive requests, {self.share} "
                "each): raise the number of receive requests, or use tcp for more peers"
            )
        self._members.add(connection)
        return self.share

    def leave(self, connection: int) -> None:
        """Release the share of a connection whose queue pair is destroyed. May be repeated."""
        self._members.discard(connection)


def unwrapped(reference: int, low_bits: int) -> int:
    """Return the number nearest to `reference` >= 0 that has these low WIRE_BITS bits."""
    modulus = 1 << WIRE_BITS
    return max(reference + (low_bits - reference + modulus // 2) % modulus - modulus // 2, low_bits % modulus)
