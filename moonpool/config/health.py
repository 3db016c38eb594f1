"""The configuration key of the sign of life that orchestrators such as Kubernetes ask for over HTTP."""

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar

from moonpool.config.fields import Key, Slice
from moonpool.errors import ConfigError

_HOST_PORT = re.compile(r"(?P<host>[^:/\[\]]+|\[[^\]/]+\]):(?P<port>\d{1,5})")


@dataclass(frozen=True)
class HealthSettings(Slice):
    """Where a role without a front door of its own answers /live and /ready."""

    panel: ClassVar[str] = "This node"
    health: Annotated[
        str,
        Key(
            "host:port at which /live and /ready are answered over HTTP, for Kubernetes' probes (0 = a free port)",
            default_text="nowhere",
        ),
    ] = ""

    @property
    def address(self) -> tuple[str, int] | None:
        """(host, port), if it is answered at all."""
        found = _HOST_PORT.fullmatch(self.health)
        return (found["host"].strip("[]"), int(found["port"])) if found else None

    def check(self) -> None:
        if self.health and (self.address is None or self.address[1] > 65535):
            raise ConfigError(f"--health is {self.health!r}: expected host:port, such as 0.0.0.0:8081")
