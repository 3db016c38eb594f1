"""Versions of the record of objectives as plain data and JSON, and the interface of version stores."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from conductor.errors import ObjectivesError, SharedStoreRefused
from conductor.policy.objectives import digest, record_from_text, record_text

__all__ = ["KEPT", "Acknowledgement", "SloVersion", "VersionReader", "VersionStore"]

KEPT = 100  # number of versions kept; older ones are removed


@dataclass(frozen=True, slots=True)
class SloVersion:
    """One version. The first has number 1; each later one has the next number.

    `origin`: "configuration", "admin", or "rollback to N". `peer`: name or address of the caller, "" without a call.
    """

    version: int
    content: str  # from `record_text`
    author: str
    reason: str
    at_s: float  # seconds since 1970
    origin: str
    peer: str = ""

    @property
    def digest(self) -> str:
        """Digest of the content: equal contents have equal digests."""
        return digest(self.content)

    @property
    def description(self) -> str:
        """Readable description of the version."""
        return f"version {self.version} by {self.author} ({self.origin}: {self.reason})"

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "digest": self.digest})

    @classmethod
    def from_json(cls, text: str) -> "SloVersion":
        """Parse a version. Raises SharedStoreRefused if it was changed or written by another program or version."""
        try:
            fields = json.loads(text)
            stored_digest = fields.pop("digest")
            found = cls(**{name: fields[name] for name in cls.__slots__})
            texts = (found.content, found.author, found.reason, found.origin, found.peer)
            if not all(isinstance(each, str) for each in texts) or type(found.version) is not int or found.version < 1:
                raise TypeError("a field has the wrong type")
            if type(found.at_s) not in (int, float):
                raise TypeError("at_s must be a number")
            float(found.at_s)
            if record_text(record_from_text(found.content)) != found.content or stored_digest != found.digest:
                raise ValueError("its content does not match its digest")
        except (
            *(ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError),
            ObjectivesError,
        ) as error:
            raise SharedStoreRefused(f"a version of the record of objectives is invalid ({error})") from error
        return found


class VersionReader:
    """Parser of versions that caches results, since stores are polled every few seconds and rarely change."""

    def __init__(self) -> None:
        self._known: dict[str, SloVersion] = {}  # by text, from the last read

    def read(self, texts: Iterable[str]) -> list[SloVersion]:
        """Parse versions, in the order of the texts. Raises SharedStoreRefused."""
        self._known = {text: self._known.get(text) or SloVersion.from_json(text) for text in texts}
        return list(self._known.values())


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """Statement that a conductor applies this version."""

    node_id: str
    incarnation: int
    version: int
    digest: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Acknowledgement":
        """Parse an acknowledgement. Raises SharedStoreRefused."""
        try:
            fields = json.loads(text)
            found = cls(**{name: fields[name] for name in cls.__slots__})
            if type(found.incarnation) is not int or type(found.version) is not int:
                raise TypeError("incarnation and version must be integers")
            if not isinstance(found.node_id, str) or not isinstance(found.digest, str):
                raise TypeError("node_id and digest must be texts")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SharedStoreRefused(f"an acknowledgement of objectives is invalid ({error!r})") from error
        return found


class VersionStore(Protocol):
    """Store of versions for all conductors of a cluster.

    All methods raise SharedStoreUnavailable for temporary failures and SharedStoreRefused for permanent ones.
    """

    @property
    def where(self) -> str:
        """Readable location, without a password."""

    @property
    def outlives(self) -> bool:
        """True if the versions outlive the conductor process."""

    async def history(self) -> list[SloVersion]:
        """Return the last versions, oldest first; [] if there are none."""

    async def put(self, versions: Sequence[SloVersion], *, after: int) -> bool:
        """Add versions (oldest first) atomically if the newest stored one has the number `after` (0: there is none).

        Otherwise returns False and writes nothing.
        """

    async def acknowledge(self, mine: Acknowledgement, ttl_s: float) -> None:
        """Store an acknowledgement; it expires after `ttl_s` unless repeated."""

    async def withdraw(self, node_id: str) -> None:
        """Remove the acknowledgement of a conductor that exits."""

    async def acknowledged(self) -> list[Acknowledgement]:
        """Return the unexpired acknowledgements of all conductors, ordered by node id."""
