"""The key material of encrypted traffic between hosts, for both planes: the messenger's tcp links and gRPC."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TlsFiles:
    """PEM files: this node's certificate, its private key, and the CA that signs all nodes' certificates; `name` is the
    DNS name that each of these carries."""

    cert: Path
    key: Path
    ca: Path
    name: str = "moonpool"
