"""The configuration keys of `serve` itself: what runs its processes, and how it looks after them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from moonpool.config.fields import Key, Slice
from moonpool.errors import ConfigError

_HOST_PORT = re.compile(r"[^:/]+:\d{1,5}|\[[^\]]+\]:\d{1,5}")
_LEAST_ORPHAN_S = 30.0


@dataclass(frozen=True)
class SupervisorSettings(Slice):
    """How `serve` looks after its processes."""

    panel: ClassVar[str] = "Supervision"
    run_dir: Annotated[
        Path | None, Key("Folder for sockets and logs", default_text="moonpool-UID/PORT in the temporary folder")
    ] = None
    ready_file: Annotated[
        Path | None, Key("JSON file written when the cluster is ready: URL, and every node's pid")
    ] = None
    startup_timeout: Annotated[float, Key("Seconds within which the cluster must be ready", low=1, high=86400)] = 180.0
    stop_grace: Annotated[
        float,
        Key(
            "Least seconds a process has for a clean stop before it is killed; it has its own drain's",
            low=0.1,
            high=3600,
        ),
    ] = 5.0
    hang_timeout: Annotated[
        float,
        Key(
            "Seconds of silence after which a process that hangs is killed and started again; 0: never",
            low=0,
            high=86400,
        ),
    ] = 30.0
    autoscale: Annotated[
        tuple[str, ...],
        Key(
            "ROLE=MIN:MAX, several: let the number of workers follow what the conductor says that the demand needs",
            default_text="as many as given",
        ),
    ] = ()
    verbose: Annotated[bool, Key("Show every log line, not only warnings", aliases=("-v",))] = False


@dataclass(frozen=True)
class RuntimeSettings(Slice):
    """What runs the processes of `serve`."""

    panel: ClassVar[str] = "Runtime"
    runtime: Annotated[
        str | None,
        Key(
            "process: children of `serve` on this machine; ray: actors of a Ray cluster",
            choices=("process", "ray"),
            default_text="process, or ray with --ray-address",
        ),
    ] = None
    ray_address: Annotated[
        str,
        Key("HOST:PORT of the Ray cluster to run in; implies ray", default_text="a Ray of our own on this machine"),
    ] = ""
    join: Annotated[
        tuple[str, ...],
        Key(
            "gRPC addresses of a running cluster's conductors, all of them: pool nodes and workers are started for "
            "that cluster, and neither conductor nor front door",
            default_text="a cluster of our own",
        ),
    ] = ()

    ray_orphan_grace: Annotated[
        float,
        Key(
            "With --ray-address and --join: seconds for which pool nodes and workers outlive `serve`, however it ends, "
            "for the next one to take over; then they drain. 0: they end with it",
            low=0,
            high=86400,
        ),
    ] = 0.0

    @property
    def is_ray(self) -> bool:
        return self.runtime == "ray" or bool(self.ray_address)

    def check(self) -> None:
        if self.runtime == "process" and self.ray_address:
            raise ConfigError(f"--ray-address is {self.ray_address!r} and --runtime process: leave one of them out")
        if self.ray_address and not _HOST_PORT.fullmatch(self.ray_address):
            raise ConfigError(
                f"--ray-address is {self.ray_address!r}: expected HOST:PORT, as `ray start --head` printed it"
            )
        if 0 < self.ray_orphan_grace < _LEAST_ORPHAN_S:
            raise ConfigError(
                f"--ray-orphan-grace is {self.ray_orphan_grace:g}: expected 0, or at least {_LEAST_ORPHAN_S:g} s, "
                "since a busy `serve` asks its nodes no more often than every 10 s"
            )
        if self.ray_orphan_grace and not (self.ray_address and self.join):
            raise ConfigError(
                "--ray-orphan-grace needs --ray-address and --join: a conductor and a front door of our own end with "
                "`serve`, and so does a Ray of our own"
            )
