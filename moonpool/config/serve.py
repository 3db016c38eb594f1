"""Settings of `moonpool serve` itself: the cluster's size, what runs its processes, and how they are supervised."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from settings.keys import InvalidSetting, Key, SettingsGroup

_HOST_PORT = re.compile(r"[^:/]+:\d{1,5}|\[[^\]]+\]:\d{1,5}")
_LEAST_ORPHAN_S = 30.0


@dataclass(frozen=True)
class TopologySettings(SettingsGroup):
    """Number of processes of each role."""

    panel: ClassVar[str] = "Cluster"
    prefill_nodes: Annotated[
        int | None, Key("Prefill workers", low=0, high=256, default_text="1, or 0 with --aggregated")
    ] = None
    decode_nodes: Annotated[
        int | None, Key("Decode workers", low=0, high=256, default_text="1, or 0 with --aggregated")
    ] = None
    aggregated: Annotated[int, Key("Workers that run both phases, as a baseline for comparison", low=0, high=256)] = 0
    pool_nodes: Annotated[
        int, Key("KV pool nodes; each stands for a host, and workers are distributed over them", low=1, high=64)
    ] = 1
    conductors: Annotated[int, Key("Conductors; each manages all nodes and can place any request", low=1, high=8)] = 1

    frontends: Annotated[
        int, Key("API servers on the HTTP port: one serves, the others stand by to take its place", low=1, high=8)
    ] = 2

    @property
    def num_prefill(self) -> int:
        """Number of prefill workers."""
        return (0 if self.aggregated else 1) if self.prefill_nodes is None else self.prefill_nodes

    @property
    def num_decode(self) -> int:
        """Number of decode workers."""
        return (0 if self.aggregated else 1) if self.decode_nodes is None else self.decode_nodes

    @property
    def num_engines(self) -> int:
        """Number of workers of all roles."""
        return self.num_prefill + self.num_decode + self.aggregated

    def check(self) -> None:
        if bool(self.num_prefill) != bool(self.num_decode):
            raise InvalidSetting(
                "prefill_nodes and decode_nodes must both be at least 1 or both 0, got "
                f"{self.num_prefill} and {self.num_decode} (--aggregated N starts workers that run both phases)"
            )
        if not self.num_engines:
            raise InvalidSetting(
                "the cluster must have workers: give --prefill-nodes and --decode-nodes, or --aggregated"
            )


@dataclass(frozen=True)
class SupervisorSettings(SettingsGroup):
    """Supervision of the processes that `serve` starts."""

    panel: ClassVar[str] = "Supervision"
    run_dir: Annotated[
        Path | None, Key("Folder for sockets and logs", default_text="moonpool-UID/PORT in the temporary folder")
    ] = None
    ready_file: Annotated[
        Path | None, Key("JSON file with the URL and the pids of all nodes, written when the cluster is ready")
    ] = None
    startup_timeout_s: Annotated[
        float, Key("Seconds within which the cluster must become ready", low=1, high=86400, unit="s")
    ] = 180.0
    stop_grace_s: Annotated[
        float,
        Key(
            "Seconds that a process may take to stop before it is killed; at least its drain time",
            low=0.1,
            high=3600,
            unit="s",
        ),
    ] = 5.0
    hang_timeout_s: Annotated[
        float,
        Key(
            "Seconds after which an unresponsive process is killed and restarted; 0 to disable",
            low=0,
            high=86400,
            unit="s",
        ),
    ] = 30.0
    autoscale: Annotated[
        tuple[str, ...],
        Key(
            "ROLE=MIN:MAX: adapt the number of workers to the demand measured by the conductor; may be given "
            "several times",
            default_text="fixed numbers",
        ),
    ] = ()
    verbose: Annotated[bool, Key("Show every log line, not only warnings", aliases=("-v",))] = False


@dataclass(frozen=True)
class RuntimeSettings(SettingsGroup):
    """Runtime that starts the processes: this machine or a Ray cluster."""

    panel: ClassVar[str] = "Runtime"
    runtime: Annotated[
        Literal["process", "ray"] | None,
        Key(
            "Runtime of the processes: process (children of `serve` on this machine) or ray (actors of a Ray cluster)",
            default_text="process, or ray with --ray-address",
        ),
    ] = None
    ray_address: Annotated[
        str,
        Key("HOST:PORT of an existing Ray cluster; implies --runtime ray", default_text="a new Ray on this machine"),
    ] = ""
    join: Annotated[
        tuple[str, ...],
        Key(
            "gRPC address of a conductor of a running cluster, given once for each: starts only pool nodes and "
            "workers, which join that cluster",
            default_text="a new cluster",
        ),
    ] = ()
    ray_gpus: Annotated[
        float,
        Key(
            "GPUs of Ray that each worker takes, if it takes any; with a fraction, workers share a GPU and divide its "
            "memory",
            low=0.01,
            high=16,
        ),
    ] = 1.0
    ray_orphan_grace_s: Annotated[
        float,
        Key(
            "With --ray-address and --join: seconds for which pool nodes and workers outlive `serve`, so that the next "
            "one can adopt them, before they drain; 0 ends them with `serve`",
            low=0,
            high=86400,
            unit="s",
        ),
    ] = 0.0

    @property
    def is_ray(self) -> bool:
        """True if the processes are actors of Ray."""
        return self.runtime == "ray" or bool(self.ray_address)

    def check(self) -> None:
        if self.runtime == "process" and self.ray_address:
            raise InvalidSetting(
                f"--ray-address {self.ray_address!r} conflicts with --runtime process: omit one of them"
            )
        if self.ray_address and not _HOST_PORT.fullmatch(self.ray_address):
            raise InvalidSetting(
                f"--ray-address must be HOST:PORT, as printed by `ray start --head`, got {self.ray_address!r}"
            )
        if self.ray_gpus > 1 and not self.ray_gpus.is_integer():
            raise InvalidSetting(f"--ray-gpus must be a whole number if it is above 1, got {self.ray_gpus:g}")
        if 0 < self.ray_orphan_grace_s < _LEAST_ORPHAN_S:
            raise InvalidSetting(
                f"--ray-orphan-grace must be 0 or at least {_LEAST_ORPHAN_S:g} s, got {self.ray_orphan_grace_s:g}: a "
                "busy `serve` may call its nodes only every 10 s"
            )
        if self.ray_orphan_grace_s and not (self.ray_address and self.join):
            raise InvalidSetting(
                "--ray-orphan-grace needs --ray-address and --join: a conductor, frontend or Ray started by `serve` "
                "ends with it"
            )
