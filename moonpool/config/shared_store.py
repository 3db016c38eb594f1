"""The configuration keys of what outlives a conductor: Redis, and snapshots of the directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from moonpool.config.fields import Key, Slice
from moonpool.errors import ConfigError


@dataclass(frozen=True)
class SharedStoreSettings(Slice):
    """What conductors share, and find again after a restart."""

    panel: ClassVar[str] = "Shared store"
    redis_url: Annotated[
        str,
        Key(
            "Redis for the registry of nodes: redis://, rediss:// or unix://; a password is better given by variable",
            default_text="no Redis",
        ),
    ] = ""
    redis_password: Annotated[
        str, Key("Password for that Redis, where its URL has none; as it is, nothing in it escaped")
    ] = ""
    cluster_name: Annotated[str, Key("Name under which Redis and snapshots belong to this cluster")] = "moonpool"
    state_dir: Annotated[
        Path | None,
        Key("Folder where the conductor keeps a snapshot of the directory", default_text="none is kept"),
    ] = None

    def check(self) -> None:
        if self.redis_password and not self.redis_url:
            raise ConfigError("a Redis password is given, but no --redis-url: give both, or neither")
        if not self.cluster_name.strip():
            raise ConfigError("--cluster-name is empty: give a name, or leave it out")
