"""Configuration of one messenger, and `Endpoint`, the address of a messenger that peers receive."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from moonpool_proto.v1 import common_pb2
from rpc.errors import InvalidArgument
from rpc.tls import TlsFiles
from settings.messenger import TlsSettings, TransportSettings
from settings.node import HostSettings

_WILDCARDS = ("", "0.0.0.0", "::")


@dataclass(frozen=True)
class MessengerConfig:
    """Configuration of one messenger. Raises InvalidArgument."""

    transport: TransportSettings = field(default_factory=TransportSettings)
    """The transports to use and their limits, and the address that the tcp listener binds."""
    host: HostSettings = field(default_factory=HostSettings)
    """Id of this host (default: the machine's boot id), port of the tcp listener, and the address that peers dial."""
    tls: TlsSettings = field(default_factory=TlsSettings)
    """Key material. If set, tcp is encrypted, and only peers with a certificate of the same CA are accepted."""
    shm_dir: Path | None = None
    """Directory of the unix socket for shm; None makes a private one."""
    default_deadline_s: float = 30.0
    """Deadline of operations for which none is given."""
    max_inbound_connections: int = 256
    """Most inbound connections at a time over tcp, and as many over unix sockets. Beyond it, a connection that has
    presented no valid key gives way to a new one; if there is none, the new one is rejected."""
    unproven_s: float = 60.0
    """Time in which a connection must present a valid key after its greeting."""
    gpu: int | None = None
    """CUDA device number of the GPU that this process uses: the nearest RDMA devices are chosen."""
    handshake_timeout_s: float = 5.0
    """Longest time for connecting, and for the greeting after it."""
    revoke_grace_s: float = 0.2
    """Time that a revoke gives transfers in flight before it cuts their connections."""
    peer_loss_grace_s: float = 1.0
    """Time in which a broken inbound connection may be replaced before its peer is reported lost."""

    def __post_init__(self) -> None:
        for name in (
            "default_deadline_s",
            "unproven_s",
            "handshake_timeout_s",
            "revoke_grace_s",
            "peer_loss_grace_s",
        ):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidArgument(f"{name} must be a positive number of seconds, got {getattr(self, name)!r}")
        if self.max_inbound_connections < 1:
            raise InvalidArgument(f"max_inbound_connections must be at least 1, got {self.max_inbound_connections!r}")
        if self.gpu is not None and self.gpu < 0:
            raise InvalidArgument(f"gpu must be at least 0, as CUDA numbers them, got {self.gpu}")
        if self.transport.transport != "shm" and self.listens_everywhere and not self.host.data_advertise:
            raise InvalidArgument(
                f"data_host is {self.transport.data_host!r}, a wildcard: set data_advertise to the address that peers "
                "dial"
            )

    @property
    def listens_everywhere(self) -> bool:
        """True if the tcp listener binds all addresses of this host."""
        return self.transport.data_host in _WILDCARDS

    @property
    def tls_files(self) -> TlsFiles | None:
        """The key material's files; None if tcp is not encrypted."""
        return TlsFiles.of(self.tls)


@dataclass(frozen=True)
class Endpoint:
    """Address of one incarnation of a node's messenger. `tcp_port` is 0 without tcp, `shm_socket` is "" without shm."""

    node_id: str
    incarnation: int
    host_id: str
    tcp_host: str
    tcp_port: int
    shm_socket: str
    rdma: bool = False
    """True if peers that connect at tcp_port may use rdma."""
    tcp_paths: tuple[str, ...] = ()
    """Further addresses (host:port) of the same messenger, on other networks."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tcp_paths", tuple(self.tcp_paths))  # from JSON it comes as a list

    def by_path(self) -> "tuple[Endpoint, ...]":
        """Return the endpoint with each of its TCP addresses, the main one first, and no further ones."""
        own = replace(self, tcp_paths=())
        others = (path.rpartition(":") for path in self.tcp_paths)
        return own, *(replace(own, tcp_host=host, tcp_port=int(port)) for host, _, port in others)

    def to_proto(self) -> common_pb2.Endpoint:
        return common_pb2.Endpoint(
            node_id=self.node_id,
            incarnation=self.incarnation,
            host_id=self.host_id,
            tcp_host=self.tcp_host,
            tcp_port=self.tcp_port,
            shm_socket=self.shm_socket,
            rdma=self.rdma,
            tcp_paths=self.tcp_paths,
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
            tcp_paths=tuple(path for path in proto.tcp_paths if _is_address(path)),
        )


def _is_address(path: str) -> bool:
    host, _, port = path.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16


def boot_id() -> str:
    """Return this machine's boot id, which is equal for all processes that may share memory."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
