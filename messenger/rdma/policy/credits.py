"""Credits: how many frames a peer may have under way to this process's inbox, so that none ever meets a full one.

A frame takes a receive request of the shared receive queue and a place in the inbox; one that comes when there is none
breaks the queue pair, or stalls every peer. So nobody sends without a credit. Credits are counted, not carried: the
owner of the inbox tells the *limit*, how many frames this peer may have sent since the connection began. A limit that
is lost, late or told twice does no harm; it rides on whatever frame goes the other way.

No deadlock: the last credit is kept for frames that do nothing but tell a limit. Two sides that have both run out of
credits for frames can thus each still send one such frame, and the rule for sending it (`owes`) does not answer a bare
limit with a bare limit for ever: one is due only when half of the share has been freed since the last one was told.
Shares are fixed, one per peer, and never lent: an idle peer finds its share whatever the others do.
"""

from dataclasses import dataclass
from typing import Final

from messenger.errors import MessengerError
from rpc.errors import InvalidArgument

LEAST_SHARE: Final = 4
WIRE_BITS: Final = 32


class InboxFull(MessengerError):
    """Every share of the shared receive queue is given to a peer."""


class SendCredits:
    """What this side may still send to one peer over one connection."""

    def __init__(self, share: int) -> None:
        """`share` is what the peer gave at the handshake. Raises InvalidArgument below LEAST_SHARE."""
        if share < LEAST_SHARE:
            raise InvalidArgument(f"a share of {share} credits is too small: at least {LEAST_SHARE} are needed")
        self._share = share
        self._limit = share
        self._sent = 0

    @property
    def available(self) -> int:
        """Frames that may be sent now; the credit kept for a bare limit is not among them."""
        return max(0, self._limit - self._sent - 1)

    def try_take(self) -> bool:
        """Use a credit for a frame. False: wait for a limit."""
        if self._limit - self._sent < 2:
            return False
        self._sent += 1
        return True

    def try_take_last(self) -> bool:
        """Use a credit, the last one too, for a frame that only tells a limit."""
        if self._limit == self._sent:
            return False
        self._sent += 1
        return True

    def told(self, wire_limit: int) -> bool:
        """The peer told a limit (its low WIRE_BITS bits). Whether frames may be sent now that could not before.

        Raises InvalidArgument for a limit that gives more than the share: the peer's count is broken.
        """
        limit = unwrapped(self._limit, wire_limit)
        if limit > self._sent + self._share:
            raise InvalidArgument(f"a peer allows {limit - self._sent} frames where its share is {self._share}")
        had = self.available
        self._limit = max(self._limit, limit)
        return had == 0 and self.available > 0


class ReceiveCredits:
    """What one peer may send to this side's inbox over one connection."""

    def __init__(self, share: int) -> None:
        """`share` is what this side gave at the handshake. Raises InvalidArgument below LEAST_SHARE."""
        if share < LEAST_SHARE:
            raise InvalidArgument(f"a share of {share} credits is too small: at least {LEAST_SHARE} are needed")
        self._share = share
        self._received = 0
        self._freed = 0
        self._told_limit = share

    @property
    def held(self) -> int:
        """Frames that came and whose places are not free yet."""
        return self._received - self._freed

    def received(self) -> None:
        """A frame came. Raises InvalidArgument when the peer had no credit for it: it breaks the protocol."""
        if self._received == self._told_limit:
            raise InvalidArgument(f"a peer sent more than its share of {self._share} frames")
        self._received += 1

    def freed(self, frames: int = 1) -> None:
        """So many places of the inbox are free again and their receive requests posted anew."""
        if not 0 <= frames <= self.held:
            raise InvalidArgument(f"{frames} places cannot be freed of {self.held} that are held")
        self._freed += frames

    @property
    def owes(self) -> bool:
        """Whether a limit should be told now, in a frame of its own if no other goes that way."""
        return 2 * (self._limit - self._told_limit) >= self._share

    def tell(self) -> int:
        """The limit to put on the frame that goes out now, its low WIRE_BITS bits; it counts as told."""
        self._told_limit = self._limit
        return self._told_limit % (1 << WIRE_BITS)

    @property
    def _limit(self) -> int:
        return self._freed + self._share


@dataclass
class Shares:
    """The places of one shared receive queue, by peer: `total` places, `share` for each connection."""

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
        """Give a connection its share. Raises InboxFull when all are given, InvalidArgument when it has one."""
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
        """The connection's queue pair is gone, its receive requests posted anew. Leaving twice is allowed."""
        self._members.discard(connection)


def unwrapped(reference: int, low_bits: int) -> int:
    """The number nearest to `reference` >= 0 that has these low WIRE_BITS bits."""
    modulus = 1 << WIRE_BITS
    return max(reference + (low_bits - reference + modulus // 2) % modulus - modulus // 2, low_bits % modulus)
