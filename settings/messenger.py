"""Settings of traffic between processes: transports for KV, encryption, join tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from settings.keys import InvalidSetting, Key, SettingsGroup
from settings.node import is_wildcard

__all__ = ["AccessSettings", "TlsSettings", "TransportChoice", "TransportSettings"]

MAX_DATA_PATHS = 7
"""Maximum number of further addresses for KV transfers."""
TransportChoice = Literal["auto", "rdma", "tcp", "shm"]


@dataclass(frozen=True)
class TransportSettings(SettingsGroup):
    """Transfers of KV between processes."""

    panel: ClassVar[str] = "Transport"
    transport: Annotated[
        TransportChoice,
        Key(
            "Transport for KV; auto uses shared memory within a host, and RDMA, if both sides have it, or TCP between "
            "hosts"
        ),
    ] = "auto"
    data_host: Annotated[str, Key("Address of this host for KV transfers over TCP")] = "127.0.0.1"
    data_paths: Annotated[
        tuple[str, ...],
        Key(
            "Address of this host on another network; may be given several times. Peers spread KV transfers over TCP "
            "over all addresses, and avoid those that fail or are slow",
            default_text="none",
        ),
    ] = ()
    streams_per_peer: Annotated[
        int, Key("Connections to each peer: one for writes, the others for reads", low=1, high=64)
    ] = 2
    max_connections_per_peer: Annotated[
        int, Key("Maximum connections that a peer may open to this node", low=1, high=1024)
    ] = 16
    rdma_devices: Annotated[
        tuple[str, ...],
        Key("RDMA device to use, e.g. mlx5_0; may be given several times", default_text="by topology"),
    ] = ()
    rdma_silence_s: Annotated[
        float,
        Key(
            "Seconds after which an RDMA device is no longer used if none of its pending transfers completes",
            low=0.5,
            high=600,
            unit="s",
        ),
    ] = 10.0

    def check(self) -> None:
        if self.streams_per_peer > self.max_connections_per_peer:
            raise InvalidSetting(
                "streams_per_peer must be at most max_connections_per_peer "
                f"({self.max_connections_per_peer}), got {self.streams_per_peer}"
            )
        if len({self.data_host, *self.data_paths}) <= len(self.data_paths) or not all(self.data_paths):
            raise InvalidSetting(
                f"data_paths must be distinct addresses other than data_host ({self.data_host}), got "
                f"{list(self.data_paths)}"
            )
        if any(map(is_wildcard, self.data_paths)):
            raise InvalidSetting(f"data_paths must be addresses that peers can reach, got {list(self.data_paths)}")
        if len(self.data_paths) > MAX_DATA_PATHS:
            raise InvalidSetting(f"data_paths must be at most {MAX_DATA_PATHS} addresses, got {len(self.data_paths)}")
        if len(set(self.rdma_devices)) < len(self.rdma_devices) or not all(self.rdma_devices):
            raise InvalidSetting(
                f"rdma_devices must be distinct names, as listed by `ibv_devices`, got {list(self.rdma_devices)}"
            )


@dataclass(frozen=True)
class TlsSettings(SettingsGroup):
    """Mutual TLS for all TCP traffic between the cluster's processes; unix sockets are not encrypted."""

    panel: ClassVar[str] = "Encryption"
    tls_cert: Annotated[
        Path | None,
        Key(
            "PEM file of this node's certificate, followed by intermediate certificates",
            default_text="no encryption",
        ),
    ] = None
    tls_key: Annotated[Path | None, Key("PEM file of the certificate's private key, unencrypted")] = None
    tls_ca: Annotated[Path | None, Key("PEM file of the CA that signs the certificates of all nodes")] = None
    tls_name: Annotated[str, Key("DNS name in the certificates of all nodes")] = "moonpool"

    def check(self) -> None:
        paths = {"tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_ca": self.tls_ca}
        missing = [key for key, path in paths.items() if path is None]
        if missing and len(missing) < len(paths):
            raise InvalidSetting(
                f"{', '.join(missing)} must be set, too: encryption needs all of tls_cert, tls_key and tls_ca"
            )
        if not self.tls_name.strip():
            raise InvalidSetting("--tls-name must not be empty: give a name, or omit it")


@dataclass(frozen=True)
class AccessSettings(SettingsGroup):
    """Authentication of callers by join tokens."""

    panel: ClassVar[str] = "Encryption"
    join_token_file: Annotated[
        Path | None,
        Key(
            "File of tokens, one per line, by which the cluster's processes authenticate each other: a process sends "
            "the first and accepts all",
            default_text="any caller is admitted",
        ),
    ] = None
