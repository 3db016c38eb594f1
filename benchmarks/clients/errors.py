"""Errors of the package.

ClientsError
├── ToolMissing       a tool could not be installed
├── ToolFailed        a tool ended with an error, or wrote no figures
└── ClusterFailed     the cluster did not start
"""


class ClientsError(Exception):
    """Base class of the package's errors."""


class ToolMissing(ClientsError):
    """A tool could not be installed."""


class ToolFailed(ClientsError):
    """A tool ended with an error, or wrote no figures."""


class ClusterFailed(ClientsError):
    """The cluster did not start."""
