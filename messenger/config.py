"""Configuration of one messenger, validated where it is made; where a messenger listens, as peers are told."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from moonpool_proto.v1 import common_pb2
from rpc.errors import InvalidArgument
from rpc.tls import TlsFiles

TransportChoice = Literal["auto", "rdma", "tcp", "shm"]

_WILDCARDS = ("", "0.0.0.0", "::")


@dataclass(frozen=True)
class MessengerConfig:
    """Raises InvalidArgument for values that cannot work."""

    listen_host: str = "127.0.0.1"
    """Address the tcp listener binds."""
    tcp_port: int = 0
    """Port the tcp listener binds; 0 takes a free one."""
    transport: TransportChoice = "auto"
    """auto: shm towards peers of the same host whose socket is in sight, else rdma where both sides have it and nothing
    is to be encrypted, else tcp. Any other: only that one."""
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
    max_connections_per_peer: int = 16
    """Of these, those of one incarnation of one peer."""
    rdma_devices: tuple[str, ...] = ()
    """Names of the RDMA devices to use; empty: chosen by topology."""
    rdma_silence_s: float = 10.0
    """A rail that completes nothing of what is under way for so long is stopped; what it carried goes by others."""
    gpu: int | None = None
    """CUDA's number of the GPU that this process computes on: the RDMA devices nearest to it are taken."""
    tls_cert: Path | None = None
    """PEM file with this node's certificate; with it tcp is encrypted, and only nodes of the same CA are talked to."""
    tls_key: Path | None = None
    """PEM file with the certificate's private key."""
    tls_ca: Path | None = None
    """PEM file with the CA that signs the certificates of all nodes."""
    tls_name: str = "moonpool"
    """DNS name that the certificates of all nodes carry."""
    handshake_timeout_s: float = 5.0
    """How long connecting, and the greeting after it, may take."""
    revoke_grace_s: float = 0.2
    """How long a revoke lets transfers in flight finish before it cuts their connections."""
    peer_loss_grace_s: float = 1.0
    """How long a broken inbound connection may take to come back before its peer is reported lost."""

    def __post_init__(self) -> None:
        if self.transport not in get_args(TransportChoice):
            raise InvalidArgument(f"transport {self.transport!r} is none of {', '.join(get_args(TransportChoice))}")
        if not 0 <= self.tcp_port <= 65535:
            raise InvalidArgument(f"tcp_port {self.tcp_port} is no port")
        for name in ("default_deadline_s", "handshake_timeout_s", "revoke_grace_s", "peer_loss_grace_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidArgument(f"{name} must be a positive number of seconds, not {getattr(self, name)!r}")
        if not 0.5 <= self.rdma_silence_s <= 600:
            raise InvalidArgument(f"rdma_silence_s must be 0.5 to 600 seconds, not {self.rdma_silence_s!r}")
        for name in ("streams_per_peer", "max_connections", "max_connections_per_peer"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} must be at least 1, not {getattr(self, name)!r}")
        if self.streams_per_peer > self.max_connections_per_peer:
            raise InvalidArgument(
                f"streams_per_peer {self.streams_per_peer} is over max_connections_per_peer "
                f"{self.max_connections_per_peer}: peers of this configuration would turn away some of the streams"
            )
        if self.gpu is not None and self.gpu < 0:
            raise InvalidArgument(f"gpu {self.gpu} is none: CUDA counts them from 0")
        if len({self.tls_cert is None, self.tls_key is None, self.tls_ca is None}) > 1:
            raise InvalidArgument("tls_cert, tls_key and tls_ca are given all three or not at all")
        if self.transport != "shm" and self.listen_host in _WILDCARDS and self.advertise_host is None:
            raise InvalidArgument(
                f"listen_host {self.listen_host!r} is a wildcard: set advertise_host to what peers dial"
            )

    @property
    def tls(self) -> TlsFiles | None:
        """Where the key material lies; None: tcp is not encrypted."""
        if self.tls_cert is None or self.tls_key is None or self.tls_ca is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca, self.tls_name)


@dataclass(frozen=True)
class Endpoint:
    """Where one incarnation of a node's messenger listens; `tcp_port` 0 or `shm_socket` "" mean: not by that."""

    node_id: str
    incarnation: int
    host_id: str
    tcp_host: str
    tcp_port: int
    shm_socket: str
    rdma: bool = False
    """Whether it speaks rdma to those who connect at tcp_port."""

    def to_proto(self) -> common_pb2.Endpoint:
        return common_pb2.Endpoint(
            node_id=self.node_id,
            incarnation=self.incarnation,
            host_id=self.host_id,
            tcp_host=self.tcp_host,
            tcp_port=self.tcp_port,
            shm_socket=self.shm_socket,
            rdma=self.rdma,
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
            rdma=proto.rdma,
        )


def boot_id() -> str:
    """This machine's boot id: equal for all processes that may share memory."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
