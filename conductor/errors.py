"""Errors of the package conductor. Calls to other roles also raise rpc.errors.ControlError.

ConductorError
├── ConductorConfigError     an invalid configuration
├── ObjectivesError          an invalid record of objectives
├── SloConflict              the record of objectives has a newer version than expected by the change
├── JoinRefused              a node that does not fit this cluster
├── FrontendRefused          a frontend of an incompatible version
├── MalformedCall            an invalid call of a frontend
├── UnknownNode              no node has joined under this id
├── SwitchRefused            the node cannot change to this role
├── NodeInUse                other nodes need the node: it cannot be drained now
├── SharedStoreError         the store shared by conductors cannot be read or written
│   ├── SharedStoreRefused       permanently: wrong password, another cluster's data, another format
│   └── SharedStoreUnavailable   temporarily: unreachable, read-only, out of memory
├── SnapshotUnusable         a snapshot of the directory that is damaged or of another cluster
└── LogFormatError           a row of an event log that this version cannot read
"""


class ConductorError(Exception):
    """Base class of the package's errors."""


class ConductorConfigError(ConductorError, ValueError):
    """Invalid configuration; the message names the field."""


class ObjectivesError(ConductorError, ValueError):
    """Invalid record of objectives; the message names the field and the expected value."""


class SloConflict(ConductorError):
    """The record of objectives was changed meanwhile; the message names the current version and its author."""


class JoinRefused(ConductorError):
    """The node's model, spec or description does not fit the cluster. Retrying without changes cannot succeed."""


class FrontendRefused(ConductorError):
    """The frontend's version and this one are incompatible; the message names both."""


class MalformedCall(ConductorError, ValueError):
    """Invalid or inconsistent call of a frontend; the message names the field."""


class UnknownNode(ConductorError, LookupError):
    """No node has joined under this id; the message lists the nodes that have."""


class SwitchRefused(ConductorError):
    """The node cannot change to this role. `reason`: one word, used as label of the metric."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NodeInUse(ConductorError):
    """Other nodes need the node; the message names them."""


class SharedStoreError(ConductorError):
    """The shared store cannot be read or written; the message gives location and cause, without a password."""


class SharedStoreRefused(SharedStoreError):
    """Permanent failure: a conductor exits if it occurs at startup."""


class SharedStoreUnavailable(SharedStoreError):
    """Temporary failure: the conductor continues without the store."""


class SnapshotUnusable(ConductorError):
    """The directory's snapshot cannot be loaded; pool nodes then send all their contents."""


class LogFormatError(ConductorError, ValueError):
    """A row of an event log is not an event or decision of this version."""
