"""What is kept in Redis, as plain data and as JSON. No I/O."""

import json
from dataclasses import asdict, dataclass

from conductor.errors import SharedStoreRefused

__all__ = ["FORMAT", "NodeRecord", "SnapshotPointer"]

FORMAT = 1  # of all that is kept; another one is refused


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node of the cluster, as the conductor that it joined describes it."""

    node_id: str
    role: str
    target: str
    incarnation: int
    host_id: str
    conductor: int  # that conductor's incarnation

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "NodeRecord":
        """Raises SharedStoreRefused."""
        try:
            fields = json.loads(text)
            record = cls(**{name: fields[name] for name in cls.__slots__})
            int(record.incarnation), int(record.conductor)
            if not all(isinstance(text, str) for text in (record.node_id, record.role, record.target)):
                raise TypeError("node_id, role and target must be texts")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SharedStoreRefused(f"a node's record cannot be read ({error!r})") from error
        return record


@dataclass(frozen=True, slots=True)
class SnapshotPointer:
    """Where a snapshot of the directory lies."""

    path: str
    host: str
    written_at: float  # seconds since 1970
    positions: dict[str, tuple[int, int]]  # per pool node: incarnation and event from which on its stream continues it

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "SnapshotPointer":
        """Raises SharedStoreRefused."""
        try:
            fields = json.loads(text)
            positions = {node: (int(at[0]), int(at[1])) for node, at in fields["positions"].items()}
            return cls(str(fields["path"]), str(fields["host"]), float(fields["written_at"]), positions)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise SharedStoreRefused(f"a pointer to a snapshot cannot be read ({error!r})") from error
