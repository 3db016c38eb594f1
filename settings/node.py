"""Settings of every role: node id, addresses, conductors, health endpoint, logs."""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from settings.keys import InvalidSetting, Key, SettingsGroup

__all__ = [
    "HOST_PORT",
    "LOG_LEVELS",
    "ConductorTargetSettings",
    "HealthSettings",
    "HostSettings",
    "ListenSettings",
    "LogSettings",
    "NodeSettings",
    "is_wildcard",
    "target_host",
]

LOG_LEVELS = ("debug", "info", "warning", "error")
_TARGET = re.compile(r"unix:.+|[^:]+:\d{1,5}|\[[^\]]+\]:\d{1,5}")
HOST_PORT = re.compile(r"(?P<host>[^:/\[\]]+|\[[^\]/]+\]):(?P<port>\d{1,5})")
SUPERVISOR_SOCKET = "supervisor.sock"  # of `serve`, in the socket_dir of the processes that it starts


def target_host(target: str) -> str:
    """Return the host of a gRPC address; "" for a unix socket."""
    return "" if target.startswith("unix:") else target.rpartition(":")[0].strip("[]")


def is_wildcard(host: str) -> bool:
    """Return True for an address such as 0.0.0.0, on which servers can listen, but to which clients cannot connect."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


@dataclass(frozen=True)
class NodeSettings(SettingsGroup):
    """Identity of a process in the cluster."""

    panel: ClassVar[str] = "This node"
    node_id: Annotated[
        str, Key("Name in the cluster; must not change across restarts", default_text="ROLE-HOSTNAME")
    ] = ""
    socket_dir: Annotated[
        Path | None,
        Key("Folder for this node's unix sockets", default_text="moonpool-UID/NODE in the temporary folder"),
    ] = None


@dataclass(frozen=True)
class ListenSettings(SettingsGroup):
    """Address of the node's gRPC server."""

    panel: ClassVar[str] = "This node"
    listen: Annotated[str, Key("gRPC address to listen on: host:port (port 0 selects a free one) or unix:/path")] = (
        "127.0.0.1:0"
    )


@dataclass(frozen=True)
class HostSettings(SettingsGroup):
    """A node's host, and the addresses by which others reach the node."""

    panel: ClassVar[str] = "This node"
    host_id: Annotated[
        str, Key("Id of the host; nodes with the same id use shared memory", default_text="this machine's boot id")
    ] = ""
    advertise: Annotated[
        str,
        Key(
            "gRPC address by which others reach this node: host:port (port 0 stands for the port of --listen)",
            default_text="the value of --listen",
        ),
    ] = ""
    data_port: Annotated[int, Key("Port for KV transfers over TCP; 0 selects a free one", low=0, high=65535)] = 0
    data_advertise: Annotated[
        str,
        Key(
            "Address by which peers reach this host for KV transfers over TCP", default_text="the value of --data-host"
        ),
    ] = ""

    def check(self) -> None:
        if self.advertise and not _TARGET.fullmatch(self.advertise):
            raise InvalidSetting(f"--advertise must be host:port or unix:/path, got {self.advertise!r}")
        if is_wildcard(target_host(self.advertise)):
            raise InvalidSetting(
                f"--advertise must be an address that others can reach, got the wildcard {self.advertise!r}"
            )
        if self.data_advertise and is_wildcard(self.data_advertise):
            raise InvalidSetting(
                f"--data-advertise must be an address that others can reach, got the wildcard {self.data_advertise!r}"
            )


@dataclass(frozen=True)
class ConductorTargetSettings(SettingsGroup):
    """Addresses of the conductors."""

    panel: ClassVar[str] = "This node"
    conductor: Annotated[
        tuple[str, ...],
        Key(
            "gRPC address of a conductor; give those of all conductors",
            default_text="required, but of an endpoint picker",
        ),
    ] = ()

    def check(self) -> None:
        if not self.conductor:
            raise InvalidSetting(
                "--conductor is required: give the gRPC address that `moonpool node conductor` printed"
            )
        self._check_distinct()

    def _check_distinct(self) -> None:
        if twice := sorted({each for each in self.conductor if self.conductor.count(each) > 1}):
            raise InvalidSetting(f"--conductor {twice[0]!r} is given twice: give each conductor once")


@dataclass(frozen=True)
class KnownConductorSettings(ConductorTargetSettings):
    """Addresses of the conductors, for a role that can do without."""

    def check(self) -> None:
        self._check_distinct()


@dataclass(frozen=True)
class HealthSettings(SettingsGroup):
    """HTTP endpoint for the probes and metrics of a role that serves no other HTTP."""

    panel: ClassVar[str] = "This node"
    health: Annotated[
        str,
        Key(
            "host:port of the HTTP endpoints /live and /ready, for Kubernetes' probes, and /metrics (port 0 selects a "
            "free one)",
            default_text="none",
        ),
    ] = ""
    metrics_tenants: Annotated[bool, Key("Name tenants in the metrics of --health, which requires no key")] = False

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port; None if there is no endpoint."""
        found = HOST_PORT.fullmatch(self.health)
        return (found["host"].strip("[]"), int(found["port"])) if found else None

    def check(self) -> None:
        if self.health and (self.address is None or self.address[1] > 65535):
            raise InvalidSetting(f"--health must be host:port, such as 0.0.0.0:8081, got {self.health!r}")


@dataclass(frozen=True)
class LogSettings(SettingsGroup):
    """Logging."""

    panel: ClassVar[str] = "Logs"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Key("Lowest level of logged records")] = "info"
    log_format: Annotated[
        Literal["text", "json"], Key("Format of log records: lines of text, or one JSON object per line")
    ] = "text"
