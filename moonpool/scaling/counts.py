"""Changes that bring every group to the requested number of workers. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moonpool.errors import ScaleRefused
from moonpool.plan import WORKER_TIER, RolePlan, WorkerGroup
from moonpool.supervision.supervisor import NodeState

MAX_WORKERS = 256  # of one role; the limit of the settings


@dataclass(frozen=True)
class CountChange:
    """Change of one group: `num_new` workers to start, and `leaving`, the newest ones, to drain."""

    group: str
    num_new: int
    leaving: tuple[str, ...]


def workers(states: Iterable[NodeState], plans: Mapping[str, RolePlan]) -> dict[str, list[str]]:
    """Return the node ids of the workers that are not leaving, by group, the oldest first."""
    found: dict[str, list[str]] = {}
    for state in states:
        if plans[state.node_id].tier == WORKER_TIER and not state.leaving:
            found.setdefault(state.node_id.rpartition("-")[0], []).append(state.node_id)
    return found


def changes(
    present: Mapping[str, list[str]], wanted: Mapping[str, int], groups: Mapping[str, WorkerGroup], *, force: bool
) -> list[CountChange]:
    """Return the changes from the present workers to the wanted counts. Raises ScaleRefused."""
    for name, count in wanted.items():
        if name not in groups:
            hint = "; every host with workers has one pool node" if name.startswith("pool") else ""
            raise ScaleRefused(f"role must be one of {', '.join(groups)}, got {name!r}{hint}")
        if not 0 <= count <= MAX_WORKERS:
            raise ScaleRefused(f"{name} must be from 0 to {MAX_WORKERS}, got {count}")
    after = {name: wanted.get(name, len(present.get(name, []))) for name in groups}
    if not force:
        for model in sorted({groups[name].model.name for name in wanted}):
            own = [group for group in groups.values() if group.model.name == model]
            _check_serves(model, {group.role: after[group.name] for group in own})
    return [
        CountChange(name, max(0, count - len(here)), tuple(reversed(here[count:])))
        for name, count in after.items()
        if count != len(here := present.get(name, []))
    ]


def _check_serves(model: str, after: Mapping[str, int]) -> None:
    if not after["aggregated"] and not (after["prefill"] and after["decode"]):
        raise ScaleRefused(
            f"model {model!r} could not be served with prefill={after['prefill']} decode={after['decode']} "
            "aggregated=0: it needs a prefill and a decode worker, or an aggregated one; --force does it anyway"
        )
