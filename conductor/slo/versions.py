"""One version of the record of objectives, as plain data and as JSON, and what a place that keeps versions can do."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from conductor.errors import ObjectivesError, SharedStoreRefused
from conductor.policy.objectives import digest, record_from_text, record_text

__all__ = ["KEPT", "Acknowledgement", "SloVersion", "VersionReader", "VersionStore"]

KEPT = 100  # versions that are kept; older ones are forgotten


@dataclass(frozen=True, slots=True)
class SloVersion:
    """Version 1 is the first; each later one has the next number, whatever it says.

    `origin`: "configuration", "admin", or "rollback to N". `peer`: who was on the other end of the call, "" of none.
    """

    version: int
    content: str  # what `record_form.record_text` gives
    author: str
    reason: str
    at_s: float  # seconds since 1970
    origin: str
    peer: str = ""

    @property
    def digest(self) -> str:
        """Names the content: equal contents have equal digests."""
        return digest(self.content)

    @property
    def told(self) -> str:
        """Which it is, for people."""
        return f"version {self.version} by {self.author} ({self.origin}: {self.reason})"

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "digest": self.digest})

    @classmethod
    def from_json(cls, text: str) -> "SloVersion":
        """Raises SharedStoreRefused: what is there was changed, or written by another program or version."""
        try:
            fields = json.loads(text)
            told = fields.pop("digest")
            found = cls(**{name: fields[name] for name in cls.__slots__})
            texts = (found.content, found.author, found.reason, found.origin, found.peer)
            if not all(isinstance(each, str) for each in texts) or type(found.version) is not int or found.version < 1:
                raise TypeError("a field is of another type")
            float(found.at_s)
            if record_text(record_from_text(found.content)) != found.content or told != found.digest:
                raise ValueError("its content is not what its digest was made of")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ObjectivesError) as error:
            raise SharedStoreRefused(f"a version of the record of objectives cannot be read ({error})") from error
        return found


class VersionReader:
    """Reads versions, each text once: stores are looked at every few seconds, and hardly ever change."""

    def __init__(self) -> None:
        self._known: dict[str, SloVersion] = {}  # of the texts that were read last

    def read(self, texts: Iterable[str]) -> list[SloVersion]:
        """In the order of the texts. Raises SharedStoreRefused."""
        self._known = {text: self._known.get(text) or SloVersion.from_json(text) for text in texts}
        return list(self._known.values())


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """A conductor goes by this version."""

    node_id: str
    incarnation: int
    version: int
    digest: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Acknowledgement":
        """Raises SharedStoreRefused."""
        try:
            fields = json.loads(text)
            found = cls(**{name: fields[name] for name in cls.__slots__})
            int(found.incarnation), int(found.version)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SharedStoreRefused(f"an acknowledgement of objectives cannot be read ({error!r})") from error
        return found


class VersionStore(Protocol):
    """Keeps versions for all conductors of a cluster.

    All methods raise SharedStoreUnavailable for what may pass, and SharedStoreRefused for what will not.
    """

    @property
    def where(self) -> str:
        """For people; without a password."""

    @property
    def outlives(self) -> bool:
        """Whether it is still there when the conductor has ended."""

    async def history(self) -> list[SloVersion]:
        """The last versions, oldest first; [] where there is none."""

    async def put(self, versions: Sequence[SloVersion], *, after: int) -> bool:
        """Add versions, oldest first, if the last one there is still number `after` (0: there is none); all at once.

        False: it is not, and nothing was written.
        """

    async def acknowledge(self, mine: Acknowledgement, ttl_s: float) -> None:
        """Say so to all; it is forgotten after `ttl_s` unless said again."""

    async def withdraw(self, node_id: str) -> None:
        """The conductor ends: nobody is to wait for it."""

    async def acknowledged(self) -> list[Acknowledgement]:
        """Of all conductors that said so lately, by node id."""
