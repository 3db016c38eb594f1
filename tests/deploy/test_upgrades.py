"""An upgrade from an earlier chart changes nothing that Kubernetes lets nobody change.

An API server refuses such an upgrade as a whole. With a real one, test_api_server.py makes it.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

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


KINDS = {
    "Deployment": "apps/v1",
    "StatefulSet": "apps/v1",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
}
BOUNDS = {"minReplicas": 2, "maxReplicas": 9}
SCALED = {
    "frontend": {"replicas": 3, "autoscaling": {"enabled": True, **BOUNDS}},
    "workers": {
        "prefill": {"autoscaling": {"enabled": True, **BOUNDS}, "leaderWorkerSet": {"size": 2}},
        "decode": {"autoscaling": {"keda": {"enabled": True}, **BOUNDS}},
    },
    "keda": {"serverAddress": "http://prometheus:9090"},
}
NAMES = {
    "moonpool-frontend": "Deployment",
    "moonpool-prefill": "LeaderWorkerSet",
    "moonpool-decode": "StatefulSet",
}


def manager(operation: str, *fields: str) -> dict[str, Any]:
    """A manager of fields of a workload's spec."""
    return {"operation": operation, "fieldsV1": {"f:spec": {f"f:{name}": {} for name in fields}}}


BY_HELM_3 = [manager("Update", "template", "replicas")]
BY_HELM_4 = [manager("Apply", "template", "replicas"), {"operation": "Update", "fieldsV1": {"f:status": {}}}]
SCALED_AFTER_HELM_3 = [manager("Update", "template"), manager("Update", "replicas")]
SCALED_AFTER_HELM_4 = [manager("Apply", "template"), manager("Update", "replicas")]
HANDED_OVER = [manager("Apply", "template"), manager("Apply", "replicas")]


@contextmanager
def api_server(objects: dict[str, Any]) -> Iterator[str]:
    """Serve discovery and these objects, by name, at an address."""
    lists: dict[str, list[dict[str, Any]]] = {}
    for kind, version in KINDS.items():
        resource = {"name": f"{kind.lower()}s", "kind": kind, "namespaced": True, "verbs": ["get"]}
        lists.setdefault(version, []).append(resource)
    groups = [
        {"name": version.partition("/")[0], "versions": [{"groupVersion": version, "version": "v1"}]}
        for version in lists
    ]
    answers = {
        "/version": {"major": "1", "minor": "32", "gitVersion": "v1.32.0"},
        "/api": {"kind": "APIVersions", "versions": []},
        "/apis": {"kind": "APIGroupList", "groups": groups},
        **{
            f"/apis/{version}": {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
            for version, resources in lists.items()
        },
        **{
            f"/apis/{one['apiVersion']}/namespaces/llm/{one['kind'].lower()}s/{name}": one
            for name, one in objects.items()
        },
    }
    missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path.partition("?")[0], missing)
            body = json.dumps(found).encode()
            self.send_response(404 if found is missing else 200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def replicas_in_upgrade(chart: Path, values: dict[str, Any], objects: dict[str, Any]) -> dict[str, int | None]:
    """Return the number of each workload in NAMES as an upgrade of these objects has it; None if it is omitted."""
    with api_server(objects) as url, helm_python.Chart.load(chart) as loaded:
        options = {"name": "moonpool", "cluster": {"server": url}}
        context = {"name": "moonpool", "context": {"cluster": "moonpool", "user": "", "namespace": "llm"}}
        access = {"apiVersion": "v1", "kind": "Config", "clusters": [options], "contexts": [context]}
        config = json.dumps(access | {"current-context": "moonpool"})
        with helm_python.Config(kubeconfig_content=config, namespace="llm") as helm:
            files = helm.render(loaded, values, name="moonpool", namespace="llm", is_upgrade=True)
    texts = (text for name, text in files.items() if not name.endswith("NOTES.txt"))
    manifests = [one for text in texts for one in yaml.safe_load_all(text) if one is not None]
    found = {(one["kind"], one["metadata"]["name"]): one["spec"] for one in manifests if one["kind"] in KINDS}
    return {name: found[kind, name].get("replicas") for name, kind in NAMES.items()}


def running(replicas: int, managers: list[dict[str, Any]]) -> dict[str, Any]:
    """The workloads in NAMES as they run."""
    return {
        name: {
            "apiVersion": KINDS[kind],
            "kind": kind,
            "metadata": {"name": name, "namespace": "llm", "managedFields": managers},
            "spec": {"replicas": replicas},
        }
        for name, kind in NAMES.items()
    }


@pytest.mark.parametrize("managers", [BY_HELM_3, BY_HELM_4, SCALED_AFTER_HELM_3])
def test_an_upgrade_that_adds_autoscalers_keeps_the_number_of_pods(chart: Path, managers: list[dict[str, Any]]) -> None:
    assert replicas_in_upgrade(chart, SCALED, running(5, managers)) == dict.fromkeys(NAMES, 5)


@pytest.mark.parametrize("managers", [SCALED_AFTER_HELM_4, HANDED_OVER])
def test_a_number_that_belongs_to_an_autoscaler_is_left_to_it(chart: Path, managers: list[dict[str, Any]]) -> None:
    assert replicas_in_upgrade(chart, SCALED, running(5, managers)) == dict.fromkeys(NAMES)


def test_new_workloads_with_autoscalers_have_no_number(chart: Path) -> None:
    assert replicas_in_upgrade(chart, SCALED, {}) == dict.fromkeys(NAMES)


def test_without_autoscalers_the_number_is_that_of_the_values(chart: Path) -> None:
    values = {
        "frontend": {"replicas": 3},
        "workers": {"prefill": {"replicas": 3, "leaderWorkerSet": {"size": 2}}, "decode": {"replicas": 3}},
    }
    assert replicas_in_upgrade(chart, values, running(5, BY_HELM_4)) == dict.fromkeys(NAMES, 3)
