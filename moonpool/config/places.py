"""Configuration keys that say where a node is and whom it calls."""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from moonpool.config.fields import Key, Slice
from moonpool.errors import ConfigError

_TARGET = re.compile(r"unix:.+|[^:]+:\d{1,5}|\[[^\]]+\]:\d{1,5}")


def target_host(target: str) -> str:
    """The host of a gRPC address; "" for a unix socket's."""
    return "" if target.startswith("unix:") else target.rpartition(":")[0].strip("[]")


def is_wildcard(host: str) -> bool:
    """Whether the address stands for all of a machine's: one can listen there, but not dial it."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


@dataclass(frozen=True)
class NodeSettings(Slice):
    """Which process of the cluster this is."""

    panel: ClassVar[str] = "This node"
    node_id: Annotated[str, Key("Name in the cluster, kept over restarts", default_text="ROLE-HOSTNAME")] = ""
    socket_dir: Annotated[
        Path | None,
        Key("Folder for this node's unix sockets", default_text="moonpool-UID/NODE in the temporary folder"),
    ] = None


@dataclass(frozen=True)
class ListenSettings(Slice):
    """Where this node is called."""

    panel: ClassVar[str] = "This node"
    listen: Annotated[str, Key("gRPC address: host:port (0 = a free one) or unix:/path")] = "127.0.0.1:0"


@dataclass(frozen=True)
class HostSettings(Slice):
    """Which host this node counts itself to, and by which addresses others reach it there."""

    panel: ClassVar[str] = "This node"
    host_id: Annotated[str, Key("Nodes of equal host share memory", default_text="this machine's boot id")] = ""
    advertise: Annotated[
        str,
        Key(
            "gRPC address that others dial, where it is not --listen: host:port (0 = the port listened at)",
            default_text="the one listened at",
        ),
    ] = ""
    data_port: Annotated[int, Key("Port for KV transfers over TCP; 0 takes a free one", low=0, high=65535)] = 0
    data_advertise: Annotated[
        str, Key("Address that peers dial for KV transfers over TCP", default_text="--data-host")
    ] = ""

    def check(self) -> None:
        if self.advertise and not _TARGET.fullmatch(self.advertise):
            raise ConfigError(f"--advertise is {self.advertise!r}: expected host:port or unix:/path")
        if is_wildcard(target_host(self.advertise)):
            raise ConfigError(f"--advertise is {self.advertise!r}, a wildcard, which nobody can dial: give an address")
        if self.data_advertise and is_wildcard(self.data_advertise):
            raise ConfigError(
                f"--data-advertise is {self.data_advertise!r}, a wildcard, which nobody can dial: give an address"
            )


@dataclass(frozen=True)
class WorkerSettings(Slice):
    """A worker's place among its host's workers."""

    panel: ClassVar[str] = "This node"
    worker_index: Annotated[
        int, Key("Which of the host's workers this is: chooses among its GPUs", low=0, high=4096)
    ] = 0
    pool: Annotated[str, Key("gRPC address of this host's pool node", default_text="required")] = ""

    def check(self) -> None:
        if not self.pool:
            raise ConfigError("--pool is required: the gRPC address of this host's pool node")


@dataclass(frozen=True)
class ConductorTarget(Slice):
    """The conductors, for a node that cannot do without."""

    panel: ClassVar[str] = "This node"
    conductor: Annotated[
        tuple[str, ...], Key("gRPC address of the conductor; where there are several, of all", default_text="required")
    ] = ()

    def check(self) -> None:
        if not self.conductor:
            raise ConfigError("--conductor is required: the gRPC address that `moonpool conductor` printed")
        if twice := sorted({each for each in self.conductor if self.conductor.count(each) > 1}):
            raise ConfigError(f"--conductor names {twice[0]!r} twice: name each conductor once")
