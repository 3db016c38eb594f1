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
    aggregated: Annotated[int, Key("Workers that run both phases: the baseline for comparison", low=0, high=256)] = 0
    pool_nodes: Annotated[
        int, Key("KV pool nodes; each stands for a host, and workers are spread over them", low=1, high=64)
    ] = 1
    conductors: Annotated[
        int, Key("Conductors; each has all nodes, and any of them places any request", low=1, high=8)
    ] = 1

    @property
    def num_prefill(self) -> int:
        """Prefill workers."""
        return (0 if self.aggregated else 1) if self.prefill_nodes is None else self.prefill_nodes

    @property
    def num_decode(self) -> int:
        """Decode workers."""
        return (0 if self.aggregated else 1) if self.decode_nodes is None else self.decode_nodes

    @property
    def num_engines(self) -> int:
        """Workers of all roles."""
        return self.num_prefill + self.num_decode + self.aggregated

    def check(self) -> None:
        if bool(self.num_prefill) != bool(self.num_decode):
            raise InvalidSetting(
                f"prefill_nodes is {self.num_prefill} and decode_nodes is {self.num_decode}: "
                "one cannot serve without the other (--aggregated N starts workers that run both phases)"
            )
        if not self.num_engines:
            raise InvalidSetting(
                "the number of workers is 0: give --prefill-nodes and --decode-nodes, or --aggregated, at least 1"
            )


@dataclass(frozen=True)
class SupervisorSettings(SettingsGroup):
    """Supervision of the processes that `serve` starts."""

    panel: ClassVar[str] = "Supervision"
    run_dir: Annotated[
        Path | None, Key("Folder for sockets and logs", default_text="moonpool-UID/PORT in the temporary folder")
    ] = None
    ready_file: Annotated[
        Path | None, Key("JSON file written when the cluster is ready: its URL, and the pid of every node")
    ] = None
    startup_timeout_s: Annotated[
        float, Key("Seconds within which the cluster must be ready", low=1, high=86400, unit="s")
    ] = 180.0
    stop_grace_s: Annotated[
        float,
        Key(
            "Seconds for a clean stop before a process is killed; at least its drain time",
            low=0.1,
            high=3600,
            unit="s",
        ),
    ] = 5.0
    hang_timeout_s: Annotated[
        float,
        Key(
            "Seconds without a sign of life after which a process is killed and restarted; 0 for never",
            low=0,
            high=86400,
            unit="s",
        ),
    ] = 30.0
    autoscale: Annotated[
        tuple[str, ...],
        Key(
            "ROLE=MIN:MAX: adapt the number of workers to the demand that the conductor measures; may be given "
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
            "process: children of `serve` on this machine; ray: actors of a Ray cluster",
            default_text="process, or ray with --ray-address",
        ),
    ] = None
    ray_address: Annotated[
        str,
        Key("HOST:PORT of the Ray cluster to run in; implies --runtime ray", default_text="a new Ray on this machine"),
    ] = ""
    join: Annotated[
        tuple[str, ...],
        Key(
            "gRPC address of a conductor of a running cluster, once for each of them: starts pool nodes and workers "
            "for that cluster, and no conductor or frontend",
            default_text="a new cluster",
        ),
    ] = ()
    ray_orphan_grace_s: Annotated[
        float,
        Key(
            "With --ray-address and --join: seconds for which pool nodes and workers outlive `serve`, for the next one "
            "to adopt them; then they drain. With 0 they end with it",
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
            raise InvalidSetting(f"--ray-address is {self.ray_address!r} and --runtime process: leave one of them out")
        if self.ray_address and not _HOST_PORT.fullmatch(self.ray_address):
            raise InvalidSetting(
                f"--ray-address is {self.ray_address!r}: expected HOST:PORT, as `ray start --head` printed it"
            )
        if 0 < self.ray_orphan_grace_s < _LEAST_ORPHAN_S:
            raise InvalidSetting(
                f"--ray-orphan-grace is {self.ray_orphan_grace_s:g}: expected 0, or at least {_LEAST_ORPHAN_S:g} s, "
                "since a busy `serve` asks its nodes no more often than every 10 s"
            )
        if self.ray_orphan_grace_s and not (self.ray_address and self.join):
            raise InvalidSetting(
                "--ray-orphan-grace needs --ray-address and --join: a conductor, a frontend or a Ray that `serve` "
                "started ends with it"
            )
