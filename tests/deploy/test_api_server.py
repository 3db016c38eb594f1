"""A real API server takes the chart: installed, upgraded from the previous chart, rolled back, removed.

The user has the rights of one namespace and no others. Skipped without the programs (tests.deploy.api_server).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Config, HelmError

from tests.deploy import api_server
from tests.deploy.api_server import OWNER, ApiServer, Reply

pytestmark = pytest.mark.nightly

KEYS = Path(__file__).parents[1] / "data" / "tls"
CUSTOM = {
    "Certificate": "cert-manager.io/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "InferencePool": "inference.networking.k8s.io/v1",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "RayCluster": "ray.io/v1",
    "ScaledObject": "keda.sh/v1alpha1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
}
# What a platform team adds to a release that runs.
ADDED_TO_PODS = {
    "extraVolumes": [{"name": "certificates", "secret": {"secretName": "company-ca"}}],
    "extraVolumeMounts": [{"name": "certificates", "mountPath": "/etc/company", "readOnly": True}],
    "initContainers": [{"name": "wait", "image": "busybox:1.36", "command": ["true"]}],
    "envFrom": [{"secretRef": {"name": "proxy"}}],
    "schedulerName": "volcano",
}
ADDED = {
    **{role: {"pod": ADDED_TO_PODS} for role in ("conductor", "frontend", "pool")},
    "workerPod": ADDED_TO_PODS,
    "extraObjects": [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "{{ .Release.Name }}-extra"}}],
}
ROUTE = {"frontend": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    programs = api_server.find_programs()
    if isinstance(programs, str):
        pytest.skip(programs)
    with api_server.running(programs, tmp_path_factory.mktemp("server"), KEYS / "node.key", KEYS / "node.pem") as found:
        found.add_custom_resources(CUSTOM)
        yield found


@pytest.fixture
def namespace(server: ApiServer, request: pytest.FixtureRequest) -> str:
    """A namespace of the test's own."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name)[-60:].strip("-")
    server.create_namespace(name)
    return name


@pytest.fixture
def helm(server: ApiServer, namespace: str) -> Iterator[Config]:
    """Helm as the owner of the namespace."""
    with Config(kubeconfig_content=server.kubeconfig(OWNER, namespace), namespace=namespace) as config:
        yield config


def merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """As Helm merges two files of values."""
    both = [key for key in values if isinstance(values[key], dict) and isinstance(more.get(key), dict)]
    return {**values, **more, **{key: merged(values[key], more[key]) for key in both}}


def manifests(release: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    found = (one for one in yaml.safe_load_all(release["manifest"]) if one is not None)
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def lost(sent: Any, stored: Any, place: str = "") -> Iterator[str]:
    """Yield the places of a manifest that the server has not stored as they were sent."""
    if sent is None or sent in ({}, []):
        return
    if isinstance(sent, dict) and isinstance(stored, dict):
        for key, value in sent.items():
            yield from lost(value, stored.get(key), f"{place}.{key}")
    elif isinstance(sent, list) and isinstance(stored, list) and len(sent) == len(stored):
        for number, (one, other) in enumerate(zip(sent, stored, strict=True)):
            yield from lost(one, other, f"{place}[{number}]")
    elif str(sent) != str(stored):  # numbers of resources are stored as text
        yield f"{place}: {sent!r} is stored as {stored!r}"


def assert_stored(server: ApiServer, namespace: str, release: dict[str, Any]) -> None:
    """The namespace has every object of the release, and every field of it."""
    stored = server.contents(namespace)
    for key, manifest in manifests(release).items():
        content = {name: value for name, value in manifest.items() if name not in ("apiVersion", "kind", "metadata")}
        assert key in stored
        assert not list(lost(content, stored[key])), key


@pytest.mark.parametrize("example_name", ["1p1d", "8p8d-rdma", "cpu-trial", "kuberay", "vllm"])  # those that it has
def test_a_release_is_upgraded_from_the_previous_chart_and_rolled_back_and_leaves_nothing(
    server: ApiServer, namespace: str, helm: Config, chart: Path, previous_chart: Path, example_name: str
) -> None:
    def values_of(folder: Path) -> dict[str, Any]:
        return dict(yaml.safe_load((folder / "examples" / f"values-{example_name}.yaml").read_text(encoding="utf-8")))

    before = server.contents(namespace)
    installed = helm.install(previous_chart, "moonpool", values_of(previous_chart))
    assert_stored(server, namespace, installed)
    first = {key: one for key, one in server.contents(namespace).items() if not is_record(key)}
    upgraded = helm.upgrade(chart, "moonpool", merged(merged(values_of(chart), ADDED), ROUTE))
    assert_stored(server, namespace, upgraded)
    assert {("Secret", "moonpool-extra"), ("HTTPRoute", "moonpool-frontend")} <= server.contents(namespace).keys()
    helm.rollback("moonpool")
    again = {key: one for key, one in server.contents(namespace).items() if not is_record(key)}
    assert again == first
    assert [one["status"] for one in helm.history("moonpool")] == ["superseded", "superseded", "deployed"]
    helm.uninstall("moonpool")
    assert server.contents(namespace) == before


def is_record(key: tuple[str, str]) -> bool:
    """Return True for Helm's own record of a revision."""
    return key[0] == "Secret" and key[1].startswith("sh.helm.release")


def test_no_field_is_unknown_or_dropped_and_nothing_is_deprecated(
    server: ApiServer, namespace: str, render: Callable[..., Any], example_values: Any, example_name: str
) -> None:
    release = render(merged(merged(example_values(example_name), ADDED), ROUTE), namespace=namespace)
    create_accounts(server, release, namespace)
    resources = server.resources()
    for manifest in release.objects:
        if manifest["kind"] != "ServiceAccount":
            path = resources[manifest["apiVersion"], manifest["kind"]].path(namespace)
            reply = server.request("POST", path, manifest, dryRun="All", fieldValidation="Strict").ok()
            assert not list(lost(manifest, reply.body)), manifest["metadata"]["name"]
            assert reply.warnings == ()


@pytest.mark.parametrize("example_name", ["cpu-trial", "vllm", "kuberay"])
def test_pods_comply_with_the_restricted_standard(
    server: ApiServer, render: Callable[..., Any], example_values: Any, example_name: str
) -> None:
    release, create = restricted(server, render, example_values(example_name), f"restricted-{example_name}")
    assert len(release.pods) >= 4
    for pod in release.pods:
        create(pod).ok()


def test_a_folder_of_the_host_does_not_comply_with_it(server: ApiServer, render: Callable[..., Any]) -> None:
    values = {"pool": {"sharedMemory": {"enabled": True}}}
    release, create = restricted(server, render, values, "restricted-sockets")
    refused = create(release.pod("moonpool-pool"))
    assert refused.status == 403
    assert "hostPath" in refused.body["message"]


def restricted(
    server: ApiServer, render: Callable[..., Any], values: dict[str, Any], namespace: str
) -> tuple[Any, Callable[[Any], Reply]]:
    """Return a release for a namespace that enforces the standard, and what tries to create one of its pods there."""
    server.create_namespace(namespace, **{"pod-security.kubernetes.io/enforce": "restricted"})
    release = render(values, namespace=namespace)
    create_accounts(server, release, namespace)

    def create(pod: Any) -> Reply:
        manifest = {**pod.template, "metadata": {**pod.template["metadata"], "name": pod.name}}
        path = f"/api/v1/namespaces/{namespace}/pods"
        return server.request("POST", path, manifest, user=OWNER, dryRun="All", fieldValidation="Strict")

    return release, create


def create_accounts(server: ApiServer, release: Any, namespace: str) -> None:
    """Create the ServiceAccounts of a release, without which no pod is admitted."""
    for account in release.kind("ServiceAccount"):
        server.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", account, user=OWNER).ok()


def test_an_upgrade_keeps_a_number_that_was_set_by_hand_only_if_its_values_have_it(
    server: ApiServer, namespace: str, helm: Config, chart: Path
) -> None:
    def values(replicas: int) -> dict[str, Any]:
        return {"workers": {"decode": {"replicas": replicas}}}

    helm.install(chart, "moonpool", values(1))
    path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets/moonpool-decode"
    server.request("PATCH", f"{path}/scale", {"spec": {"replicas": 3}}, user=OWNER, fieldManager="kubectl").ok()
    with pytest.raises(HelmError, match=r'conflict with "kubectl".*replicas'):
        helm.upgrade(chart, "moonpool", values(1))
    helm.upgrade(chart, "moonpool", values(3))
    assert server.request("GET", path).ok().body["spec"]["replicas"] == 3


def test_an_upgrade_that_adds_an_autoscaler_keeps_the_number_and_later_ones_leave_it_to_the_autoscaler(
    server: ApiServer, namespace: str, helm: Config, chart: Path
) -> None:
    path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets/moonpool-decode"
    autoscaling = {"enabled": True, "minReplicas": 2, "maxReplicas": 9}

    def upgrade(**values: Any) -> int:
        """Return the number of workers after an upgrade."""
        helm.upgrade(chart, "moonpool", {"workers": {"decode": {"autoscaling": autoscaling}}, **values})
        return int(server.request("GET", path).ok().body["spec"]["replicas"])

    def scale(number: int) -> None:
        scaled = {"spec": {"replicas": number}}
        server.request("PATCH", f"{path}/scale", scaled, fieldManager="kube-controller-manager").ok()

    helm.install(chart, "moonpool", {"workers": {"decode": {"replicas": 4}}})
    assert upgrade() == 4
    assert upgrade(workerDrainSeconds=100) == 4
    for number in (6, 5):
        scale(number)
        assert upgrade(workerDrainSeconds=number) == number
    scale(7)
    helm.rollback("moonpool")
    assert server.request("GET", path).ok().body["spec"]["replicas"] == 7


def test_claims_of_running_conductors_cannot_be_changed(helm: Config, chart: Path) -> None:
    helm.install(chart, "moonpool")
    with pytest.raises(HelmError, match=r"moonpool-conductor.*Forbidden"):
        helm.upgrade(chart, "moonpool", {"conductor": {"persistence": {"enabled": True}}})
