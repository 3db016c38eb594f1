"""An upgrade from an earlier chart changes nothing that Kubernetes lets nobody change.

An API server refuses such an upgrade as a whole. With a real one, test_api_server.py makes it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Fields of a StatefulSet's spec that may change; of other workloads all but the selector may.
CHANGEABLE = {
    "minReadySeconds",
    "ordinals",
    "persistentVolumeClaimRetentionPolicy",
    "replicas",
    "revisionHistoryLimit",
    "template",
    "updateStrategy",
}


def fixed(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an object that are the same for as long as it exists."""
    spec = manifest.get("spec", {})
    match manifest["kind"]:
        case "StatefulSet":
            return {key: value for key, value in spec.items() if key not in CHANGEABLE}
        case "Deployment" | "DaemonSet":
            return {"selector": spec["selector"]}
        case "Service":
            return {"clusterIP": spec.get("clusterIP")}
        case "Job":
            return {key: spec.get(key) for key in ("selector", "template", "completionMode")}
        case _:
            return {}


def conflicts(before: Any, after: Any) -> list[str]:
    """Return the objects of two releases that cannot be changed from one into the other."""
    earlier, later = (
        {(one["kind"], one["metadata"]["name"]): fixed(one) for one in release.objects} for release in (before, after)
    )
    return [" ".join(key) for key in sorted(earlier.keys() & later.keys()) if earlier[key] != later[key]]


@pytest.mark.parametrize("example_name", ["1p1d", "8p8d-rdma", "cpu-trial", "kuberay", "vllm"])  # those that it has
def test_an_upgrade_from_the_previous_chart_changes_no_fixed_field(
    render: Callable[..., Any], example_values: Any, example_name: str, previous_chart: Path
) -> None:
    values = example_values(example_name)
    before, after = render(values, folder=previous_chart), render(values)
    assert len(after.kind("StatefulSet")) >= 1
    assert conflicts(before, after) == []


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("StatefulSet", "serviceName", "another"),
        ("StatefulSet", "volumeClaimTemplates", []),
        ("Deployment", "selector", {"matchLabels": {"app": "another"}}),
        ("DaemonSet", "selector", {"matchLabels": {"app": "another"}}),
        ("Service", "clusterIP", "None"),
    ],
)
def test_a_change_of_a_fixed_field_is_noticed(render: Callable[..., Any], kind: str, field: str, value: Any) -> None:
    before, after = render(), copy.deepcopy(render())
    changed = next(one for one in after.kind(kind) if one["spec"].get(field) != value)
    changed["spec"][field] = value
    assert conflicts(before, after) == [f"{kind} {changed['metadata']['name']}"]
