"""Configuration of one messenger, validated where it is made; where a messenger listens, as peers are told."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from messenger.errors import InvalidArgument
from moonpool_proto.v1 import common_pb2

TransportChoice = Literal["auto", "tcp", "shm"]

_WILDCARDS = ("", "0.0.0.0", "::")


@dataclass(frozen=True)
class MessengerConfig:
    """Raises InvalidArgument for values that cannot work."""

    listen_host: str = "127.0.0.1"
    """Address the tcp listener binds."""
    tcp_port: int = 0
    """Port the tcp listener binds; 0 takes a free one."""
    transport: TransportChoice = "auto"
    """auto: shm towards peers of the same host whose socket is in sight, else tcp; tcp or shm: only that one."""
    run_dir: Path | None = None
    """Directory of the unix socket that shm uses; None makes a private one."""
    host_id: str | None = None
    """Peers of equal host_id may share memory; None takes the machine's boot id."""
    default_deadline_s: float = 30.0
    """Deadline of operations that name none."""
    streams_per_peer: int = 2
    """Connections to one peer: the first carries writes and notifies in order, the others carry reads."""
    advertise_host: str | None = None
    """Address told to peers; needed when listen_host is a wildcard, which nobody can connect to."""
    max_connections: int = 256
    """Inbound connections served at a time; more are turned away with a named reason."""
    handshake_timeout_s: float = 5.0
    """How long connecting, and the greeting after it, may take."""
    revoke_grace_s: float = 0.2
    """How long a revoke lets transfers in flight finish before it cuts their connections."""
    peer_loss_grace_s: float = 1.0
    """How long a broken inbound connection may take to come back before its peer is reported lost."""

    def __post_init__(self) -> None:
        if self.transport not in ("auto", "tcp", "shm"):
            raise InvalidArgument(f"transport {self.transport!r} is none of auto, tcp, shm")
        if not 0 <= self.tcp_port <= 65535:
            raise InvalidArgument(f"tcp_port {self.tcp_port} is no port")
        for name in ("default_deadline_s", "handshake_timeout_s", "revoke_grace_s", "peer_loss_grace_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidArgument(f"{name} must be a positive number of seconds, not {getattr(self, name)!r}")
        for name in ("streams_per_peer", "max_connections"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} must be at least 1, not {getattr(self, name)!r}")
        if self.transport != "shm" and self.listen_host in _WILDCARDS and self.advertise_host is None:
            raise InvalidArgument(
                f"listen_host {self.listen_host!r} is a wildcard: set advertise_host to what peers dial"
            )


@dataclass(frozen=True)
class Endpoint:
    """Where one incarnation of a node's messenger listens; `tcp_port` 0 or `shm_socket` "" mean: not by that."""

    node_id: str
    incarnation: int
    host_id: str
    tcp_host: str
    tcp_port: int
    shm_socket: str

    def to_proto(self) -> common_pb2.Endpoint:
        return common_pb2.Endpoint(
            node_id=self.node_id,
            incarnation=self.incarnation,
            host_id=self.host_id,
            tcp_host=self.tcp_host,
            tcp_port=self.tcp_port,
            shm_socket=self.shm_socket,
        )

    @classmethod
    def from_proto(cls, proto: common_pb2.Endpoint) -> "Endpoint":
        return cls(
            node_id=proto.node_id,
            incarnation=proto.incarnation,
            host_id=proto.host_id,
            tcp_host=proto.tcp_host,
            tcp_port=proto.tcp_port,
            shm_socket=proto.shm_socket,
        )


def boot_id() -> str:
    """This machine's boot id: equal for all processes that may share memory."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
