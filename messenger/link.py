"""What a connection gives to both of its sides, whatever it is made of: frames, and an end that anyone can make."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from messenger.frames import Frame, Message

__all__ = ["Link", "LinkClosed"]


class LinkClosed(ConnectionError):
    """The other side closed, or this side cut the link."""


class Link(ABC):
    """One thread receives and one thread sends at a time; `cut` may be called from any thread and ends both."""

    address: str
    """Names the other side in errors and logs."""

    @abstractmethod
    def set_timeout(self, timeout_s: float | None) -> None:
        """All that follows may take so long, for the handshake; None: calls block without limit, which `cut` ends."""

    def open(self) -> None:  # noqa: B027  (most links have nothing to agree on)
        """Agree on what comes before the first frame, on both sides. Raises ProtocolError or OSError when it fails."""

    @abstractmethod
    def send(self, message: Message | Frame, views: Sequence[memoryview] = (), fd: int | None = None) -> None:
        """Send a frame, then the views' bytes; `fd` travels with the frame where the transport passes descriptors.

        Raises OSError when cut.
        """

    @abstractmethod
    def receive(self) -> Message:
        """The next frame. Raises ProtocolError for bytes that are none, LinkClosed or OSError when the link ended."""

    def receive_here(self) -> Message | None:
        """The next frame if it is here already, as a whole; a link that cannot tell has none."""
        return None

    @abstractmethod
    def peer_is_gone(self) -> bool:
        """Whether the other side closed, cut or died, even though bytes of it may still be unread."""

    @abstractmethod
    def cut(self) -> None:
        """End the link: blocked calls of any thread return with an error. What it holds stays until `close`."""

    @abstractmethod
    def close(self, *, reset: bool = False) -> None:
        """Free what the link holds once no thread uses it; `reset` also discards what has not been sent yet."""
