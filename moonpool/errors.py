"""Errors of the application; `exit_code` is the exit status of the process.

MoonpoolError               1
├── ConfigError             2  the configuration is wrong: a retry cannot succeed
│   ├── UnknownKey          2  an unknown key, flag or variable
│   ├── PortInUse           2  the address is already in use
│   ├── RunDirInUse         2  another cluster uses the run directory
│   ├── ModelFolderError    2  the model folder lacks what a model needs
│   ├── RayUnusable         2  Ray is not installed, not reachable, or lacks resources
│   └── ScaleRefused        2  an impossible number of workers
├── ModelNotDownloaded      1  a model cannot be downloaded, nor is it in the cache
├── RoleFailed              1  a role ended permanently; 2 if it rejected its configuration
│   └── StartupFailed       1  the same during start-up, or it was not ready in time
├── DrainRefused            1  the node cannot be drained, or is unknown
├── ClusterNotFound         1  no running cluster was found, or it does not answer
├── SloNotChanged           1  objectives were not changed: a concurrent change, or no store
├── PoolCallFailed          1  a pool node did not answer, or rejected the request
├── DecisionLogError        1  the decision log is missing or cannot be read
├── ReceiptError            1  a receipt cannot be read, or is malformed
├── ChatFailed              1  a chat cannot start, or an answer failed
│   ├── ChatFileError       1  a conversation's file cannot be read or written
│   └── ChatCommandError    1  an unknown or malformed /command
├── TransferBenchFailed     1  the measurement failed, or bytes arrived corrupted
└── DemoFailed              1  the demo's result is not as expected
"""

from collections.abc import Sequence


class MoonpoolError(Exception):
    """Root of the package's errors; the message is shown to the user unchanged."""

    exit_code = 1


class ConfigError(MoonpoolError):
    """Invalid configuration; the message names the key, its source, and the allowed values."""

    exit_code = 2


class UnknownKey(ConfigError):
    """An unknown configuration key; the message suggests the nearest valid one."""


class PortInUse(ConfigError):
    """The HTTP port is in use."""


class RunDirInUse(ConfigError):
    """The run directory belongs to a running cluster, or to another user."""


class ModelFolderError(ConfigError):
    """The model folder is missing or incomplete."""


class ModelNotDownloaded(MoonpoolError):
    """A model that is given by its Hugging Face id cannot be downloaded, and is not in the cache."""


class RoleFailed(MoonpoolError):
    """A role's process ended permanently. `log_tail` holds its last lines, `log_path` the whole log."""

    def __init__(
        self, reason: str, *, node_id: str, log_tail: Sequence[str], log_path: str, exit_code: int = 1
    ) -> None:
        tail = "\n".join(f"  {line}" for line in log_tail) or "  (no output)"
        super().__init__(f"{node_id} {reason}; its last lines:\n{tail}\nFull log: {log_path}")
        self.node_id = node_id
        self.log_tail = tuple(log_tail)
        self.log_path = log_path
        self.exit_code = exit_code


class StartupFailed(RoleFailed):
    """A role did not start; the cluster was stopped."""


class ClusterNotFound(MoonpoolError):
    """No cluster was found, or it does not answer."""


class SloNotChanged(MoonpoolError):
    """A concurrent change came first, the store is unavailable, or a conductor did not apply the version in time."""


class PoolCallFailed(MoonpoolError):
    """There is no pool node, it does not answer, or it rejects the request; the message gives the reason."""


class DecisionLogError(MoonpoolError):
    """There is no decision log, it cannot be read, or its events cannot be replayed."""


class ReceiptError(MoonpoolError):
    """A receipt cannot be read or is malformed; the message names the field."""


class ChatFailed(MoonpoolError):
    """No server was found, or its answer is incomplete."""


class ChatFileError(ChatFailed):
    """A conversation's file cannot be read, written or parsed."""


class ChatCommandError(ChatFailed):
    """Unknown or malformed command of the chat; the message suggests the nearest."""


class RayUnusable(ConfigError):
    """Ray is not installed, cannot be reached, or lacks the resources that the cluster needs."""


class ScaleRefused(ConfigError):
    """The requested counts are impossible; the message gives the reason and the alternatives."""


class DrainRefused(MoonpoolError):
    """The conductor rejects the drain, or the node is unknown."""


class TransferBenchFailed(MoonpoolError):
    """The other side cannot be reached or rejects the session, or the received bytes differ from those sent."""


class DemoFailed(MoonpoolError):
    """The demo's report shows a failure."""
