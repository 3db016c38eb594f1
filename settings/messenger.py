"""Settings of traffic between processes: how KV moves, how traffic between hosts is encrypted, who is admitted."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from settings.keys import InvalidSetting, Key, SettingsGroup

__all__ = ["AccessSettings", "TlsSettings", "TransportChoice", "TransportSettings"]

TransportChoice = Literal["auto", "rdma", "tcp", "shm"]


@dataclass(frozen=True)
class TransportSettings(SettingsGroup):
    """Transfers of KV between processes."""

    panel: ClassVar[str] = "Transport"
    transport: Annotated[
        TransportChoice,
        Key("auto: shared memory within a host; between hosts RDMA if both have it, else TCP"),
    ] = "auto"
    data_host: Annotated[str, Key("Address of this host for KV transfers over TCP")] = "127.0.0.1"
    streams_per_peer: Annotated[
        int, Key("Connections to one peer: the first carries writes, the others reads", low=1, high=64)
    ] = 2
    max_connections_per_peer: Annotated[
        int, Key("Connections that one peer may open to this node; more are refused", low=1, high=1024)
    ] = 16
    rdma_devices: Annotated[
        tuple[str, ...],
        Key("RDMA device to use, e.g. mlx5_0; may be given several times", default_text="by topology"),
    ] = ()
    rdma_silence_s: Annotated[
        float,
        Key(
            "Seconds after which an RDMA device that completes none of its pending transfers is taken out of use",
            low=0.5,
            high=600,
            unit="s",
        ),
    ] = 10.0

    def check(self) -> None:
        if self.streams_per_peer > self.max_connections_per_peer:
            raise InvalidSetting(
                f"streams_per_peer is {self.streams_per_peer} and max_connections_per_peer "
                f"{self.max_connections_per_peer}: peers with the same settings would refuse some of the streams; "
                "expected at most max_connections_per_peer"
            )
        if len(set(self.rdma_devices)) < len(self.rdma_devices) or not all(self.rdma_devices):
            raise InvalidSetting(
                f"rdma_devices is {list(self.rdma_devices)}: expected different names, as `ibv_devices` lists them"
            )


@dataclass(frozen=True)
class TlsSettings(SettingsGroup):
    """Mutual TLS for all TCP traffic between the cluster's processes; unix sockets are not encrypted."""

    panel: ClassVar[str] = "Encryption"
    tls_cert: Annotated[
        Path | None,
        Key(
            "PEM file: this node's certificate, and the certificates between it and the CA",
            default_text="no encryption",
        ),
    ] = None
    tls_key: Annotated[Path | None, Key("PEM file: the certificate's private key, not encrypted")] = None
    tls_ca: Annotated[Path | None, Key("PEM file: the CA that signs the certificates of all nodes")] = None
    tls_name: Annotated[str, Key("DNS name that the certificates of all nodes carry")] = "moonpool"

    def check(self) -> None:
        paths = {"tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_ca": self.tls_ca}
        missing = [key for key, path in paths.items() if path is None]
        if missing and len(missing) < len(paths):
            raise InvalidSetting(
                f"{', '.join(missing)} not set: encryption needs tls_cert, tls_key and tls_ca together; set all three, "
                "or none"
            )
        if not self.tls_name.strip():
            raise InvalidSetting("--tls-name is empty: give a name, or leave it out")


@dataclass(frozen=True)
class AccessSettings(SettingsGroup):
    """Callers that the cluster's processes admit."""

    panel: ClassVar[str] = "Encryption"
    join_token_file: Annotated[
        Path | None,
        Key(
            "File of tokens, one per line, that admit the cluster's processes to each other: each sends the first and "
            "accepts all",
            default_text="any caller is admitted",
        ),
    ] = None
