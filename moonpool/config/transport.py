"""The configuration keys of what goes between processes: how KV moves, and how traffic between hosts is encrypted."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from moonpool.config.fields import Key, Slice
from moonpool.errors import ConfigError

if TYPE_CHECKING:
    from rpc.tls import TlsFiles


@dataclass(frozen=True)
class TransportSettings(Slice):
    """How KV moves between processes."""

    panel: ClassVar[str] = "Transport"
    transport: Annotated[
        str,
        Key(
            "auto: shared memory within a host, between hosts RDMA where both have it, else TCP",
            choices=("auto", "rdma", "tcp", "shm"),
        ),
    ] = "auto"
    data_host: Annotated[str, Key("Address of this host for KV transfers over TCP")] = "127.0.0.1"
    streams_per_peer: Annotated[
        int, Key("Connections to one peer: the first carries writes, the others reads", low=1, high=64)
    ] = 2
    max_connections_per_peer: Annotated[
        int, Key("Connections that one peer may have to this node; more are turned away", low=1, high=1024)
    ] = 16
    rdma_devices: Annotated[
        tuple[str, ...],
        Key("RDMA device to use, e.g. mlx5_0; may be given several times", default_text="by topology"),
    ] = ()
    rdma_silence: Annotated[
        float,
        Key(
            "Seconds after which an RDMA device that completes nothing of what is under way is done without",
            low=0.5,
            high=600,
        ),
    ] = 10.0
    push_timeout: Annotated[
        float,
        Key("Seconds after which a push of KV to a decode worker that takes nothing is given up", low=0.1, high=3600),
    ] = 10.0

    def check(self) -> None:
        if self.streams_per_peer > self.max_connections_per_peer:
            raise ConfigError(
                f"streams_per_peer is {self.streams_per_peer} and max_connections_per_peer "
                f"{self.max_connections_per_peer}: peers with the same settings would turn some of them away"
            )
        if len(set(self.rdma_devices)) < len(self.rdma_devices) or not all(self.rdma_devices):
            raise ConfigError(
                f"rdma_devices is {list(self.rdma_devices)}: expected different names, as in `ibv_devices`"
            )


@dataclass(frozen=True)
class AccessSettings(Slice):
    """Whom the cluster's processes answer, beside what encryption asks for."""

    panel: ClassVar[str] = "Encryption"
    join_token_file: Annotated[
        Path | None,
        Key(
            "File of tokens, one per line, that the cluster's processes show each other: the first; all are accepted",
            default_text="whoever reaches a process may call it",
        ),
    ] = None


@dataclass(frozen=True)
class TlsSettings(Slice):
    """Mutual TLS for all that goes over TCP between the cluster's processes; unix sockets stay as they are."""

    panel: ClassVar[str] = "Encryption"
    tls_cert: Annotated[
        Path | None, Key("PEM file: this node's certificate and what links it to the CA", default_text="no encryption")
    ] = None
    tls_key: Annotated[Path | None, Key("PEM file: the certificate's private key, not encrypted")] = None
    tls_ca: Annotated[Path | None, Key("PEM file: the CA by which all nodes' certificates are signed")] = None
    tls_name: Annotated[str, Key("DNS name that all nodes' certificates carry")] = "moonpool"

    @property
    def files(self) -> "TlsFiles | None":
        """Where the key material lies; None where nothing is encrypted."""
        if self.tls_cert is None or self.tls_key is None or self.tls_ca is None:
            return None
        from rpc.tls import TlsFiles

        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca, self.tls_name)

    def check(self) -> None:
        paths = {"tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_ca": self.tls_ca}
        missing = [key for key, path in paths.items() if path is None]
        if missing and len(missing) < len(paths):
            raise ConfigError(
                f"{', '.join(missing)} not set: encryption needs tls_cert, tls_key and tls_ca together, none of them "
                "without the others"
            )
        if not self.tls_name.strip():
            raise ConfigError("--tls-name is empty: give a name, or leave it out")
