"""Every error the application raises; `exit_code` is what the process ends with. Nothing else lives here.

MoonpoolError               1
├── ConfigError             2  the configuration is wrong: running the same again cannot help
│   ├── UnknownKey          2  a key, flag or variable that nothing reads
│   ├── PortInUse           2  somebody listens at the address already
│   ├── RunDirInUse         2  another cluster lives in the run directory
│   ├── ModelFolderError    2  the model folder lacks what a model needs
│   ├── RayUnusable         2  Ray is not installed, not reachable, or lacks resources
│   └── ScaleRefused        2  a number of workers that cannot be
├── RoleFailed              1  a role ended for good; 2 when it refused its configuration
│   └── StartupFailed       1  the same, or it was not ready in time, while the cluster came up
├── DrainRefused            1  a node that cannot be drained, or is unknown
├── ClusterNotFound         1  no running cluster could be found or asked
├── SloNotChanged           1  objectives stay as they are: somebody was faster, or they cannot be stored now
├── PoolNotAsked            1  a pool node did not answer, or refused what was asked of it
├── DecisionLogError         1  no decision log where one was sought, or one that cannot be read
├── ChatFailed              1  a chat cannot begin, or an answer failed
│   ├── ChatFileError       1  a conversation cannot be read from a file or written to it
│   └── ChatCommandError    1  a line that begins with / is no command
├── TransferBenchFailed     1  nothing could be measured between two hosts, or bytes arrived wrong
└── DemoFailed              1  the demo ran, and its result is not what it must be
"""

from collections.abc import Sequence


class MoonpoolError(Exception):
    """Root of the package's errors; the message is shown to the user as it is."""

    exit_code = 1


class ConfigError(MoonpoolError):
    """The configuration is wrong; the message names the key, where it came from, and what is allowed."""

    exit_code = 2


class UnknownKey(ConfigError):
    """A configuration key that nothing reads; the message suggests the nearest valid one."""


class PortInUse(ConfigError):
    """The HTTP port is taken."""


class RunDirInUse(ConfigError):
    """The run directory belongs to a running cluster, or to another user."""


class ModelFolderError(ConfigError):
    """The model folder is missing or incomplete."""


class RoleFailed(MoonpoolError):
    """A role's process ended for good. `log_tail` holds its last lines, `log_path` the whole log."""

    def __init__(
        self, reason: str, *, node_id: str, log_tail: Sequence[str], log_path: str, exit_code: int = 1
    ) -> None:
        tail = "\n".join(f"  {line}" for line in log_tail) or "  (it wrote nothing)"
        super().__init__(f"{node_id} {reason}; its last lines:\n{tail}\nThe whole log: {log_path}")
        self.node_id = node_id
        self.log_tail = tuple(log_tail)
        self.log_path = log_path
        self.exit_code = exit_code


class StartupFailed(RoleFailed):
    """A role did not come up; the cluster was stopped again."""


class ClusterNotFound(MoonpoolError):
    """There is no cluster where one was sought, or it does not answer."""


class SloNotChanged(MoonpoolError):
    """Somebody else was faster, the store is away, or not every conductor goes by the new version in time."""


class PoolNotAsked(MoonpoolError):
    """There is no pool node, it does not answer, or it refuses; the message names it and says why."""


class DecisionLogError(MoonpoolError):
    """There is no decision log, it cannot be read, or its events cannot be replayed; the message says where and why."""


class ChatFailed(MoonpoolError):
    """No server to chat with, or no whole answer from it."""


class ChatFileError(ChatFailed):
    """A conversation's file cannot be read, written or understood."""


class ChatCommandError(ChatFailed):
    """No command of a chat; the message names the nearest."""


class RayUnusable(ConfigError):
    """Ray is not installed, cannot be reached, or lacks the resources that the cluster asks for."""


class ScaleRefused(ConfigError):
    """The counts asked for cannot be; the message says why and what can."""


class DrainRefused(MoonpoolError):
    """The conductor does not let the node go, or does not know it."""


class TransferBenchFailed(MoonpoolError):
    """The other side cannot be reached or refuses, or what arrived is not what was sent."""


class DemoFailed(MoonpoolError):
    """The demo's report shows something that must not be."""
