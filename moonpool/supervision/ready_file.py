"""Ready file: JSON in which `serve` describes its processes, for scripts, tests and `moonpool status`."""

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from moonpool.errors import ClusterNotFound
from moonpool.plan import RolePlan
from moonpool.supervision.supervisor import NodeState

READY_NAME = "serve.json"  # in the run directory


@dataclass(frozen=True)
class ReadyNode:
    """One process of the cluster, as the ready file describes it."""

    role: str
    pid: int | None  # None while it is being restarted
    target: str  # gRPC address; the URL for a frontend, "" while it stands by
    ready: bool
    restarts: int
    log: str
    model: str = ""  # model that a worker serves


@dataclass(frozen=True)
class ReadyModel:
    """One served model."""

    name: str
    aliases: list[str]
    path: str


@dataclass(frozen=True)
class ReadyFile:
    """Description of a running cluster."""

    url: str  # http://HOST:PORT; "" for workers that joined another cluster
    model: str  # the first one's name
    supervisor_pid: int
    run_dir: str
    conductor: str  # gRPC address
    nodes: dict[str, ReadyNode] = field(default_factory=dict)
    models: list[ReadyModel] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Replace `path` atomically: a reader sees the old or the new content, never a part."""
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC  # the folder may be everybody's
        with open(os.open(partial, flags, 0o644), "w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self), indent=2) + "\n")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> "ReadyFile":
        """Read a ready file. Raises ClusterNotFound if there is none, or it has another form."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            nodes = {node_id: ReadyNode(**node) for node_id, node in content.pop("nodes").items()}
            models = [ReadyModel(**model) for model in content.pop("models")]
            return cls(**content, nodes=nodes, models=models)
        except OSError as error:
            raise ClusterNotFound(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ClusterNotFound(f"{path} is not a ready file of `moonpool serve`: {error}") from error


def ready_nodes(states: Sequence[NodeState], plans: Mapping[str, RolePlan]) -> dict[str, ReadyNode]:
    """Return the nodes' part of a ready file; an address that a node announced overrides the planned one."""
    return {
        state.node_id: ReadyNode(
            role=state.role,
            pid=state.pid,
            target=str((state.announcement or {}).get("target", plans[state.node_id].target)),
            ready=state.announcement is not None,
            restarts=state.restarts,
            log=str(state.log_path),
            model=plans[state.node_id].model,
        )
        for state in states
    }
