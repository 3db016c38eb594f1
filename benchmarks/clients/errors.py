"""Errors of a run of the clients.

ClientsError
├── ToolMissing       a tool is not installed and could not be
├── ToolFailed        a tool ran and ended with an error, or wrote no figures
└── ClusterFailed     the cluster did not start
"""


class ClientsError(Exception):
    """Root of the errors here."""


class ToolMissing(ClientsError):
    """A tool is not installed and could not be."""


class ToolFailed(ClientsError):
    """A tool ran and ended with an error, or wrote no figures."""


class ClusterFailed(ClientsError):
    """The cluster did not start."""
