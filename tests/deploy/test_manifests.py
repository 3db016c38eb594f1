"""Every manifest is what Kubernetes and operators (KubeRay, KEDA, LeaderWorkerSet, prometheus-operator, cert-manager)
take, to the last field; and those of one release fit together.
"""

import copy
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES = "1.32"


def closed(schema: Any) -> Any:
    """A custom resource's schema as the API server holds to it when it is strict: no field but those it names."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if isinstance(found.get("properties"), dict) and "additionalProperties" not in found:
        found["additionalProperties"] = False
    if found.pop("x-kubernetes-int-or-string", False):
        found.pop("type", None)
        found["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return found


def load(name: str) -> Any:
    return yaml.safe_load((SCHEMAS / name).read_text(encoding="utf-8"))


RAY_CLUSTER = closed(load("ray.io_raycluster.yaml"))
CUSTOM = {
    "monitoring.coreos.com/v1": load("monitoring.coreos.com.yaml"),
    "cert-manager.io/v1": load("cert-manager.io.yaml"),
    "keda.sh/v1alpha1": load("keda.sh.yaml"),
    "leaderworkerset.x-k8s.io/v1": load("leaderworkerset.x-k8s.io.yaml"),
}


def check(manifest: dict[str, Any]) -> None:
    """Raises what is wrong with it."""
    version, kind = manifest["apiVersion"], manifest["kind"]
    if version == "ray.io/v1":
        jsonschema.validate(manifest, RAY_CLUSTER)
        head = copy.deepcopy(manifest["spec"]["headGroupSpec"]["template"])
        if options := manifest["spec"].get("autoscalerOptions"):
            fields = ("env", "resources", "securityContext", "volumeMounts")
            head["spec"]["containers"].append({"name": "autoscaler", **{name: options[name] for name in fields}})
        for template in (head, *(group["template"] for group in manifest["spec"]["workerGroupSpecs"])):
            check_pods(template)
    elif version in CUSTOM:
        schemas = CUSTOM[version]
        jsonschema.validate(manifest["spec"], {**schemas, **schemas[kind]})
        if kind == "LeaderWorkerSet":
            check_pods(manifest["spec"]["leaderWorkerTemplate"]["workerTemplate"])
    else:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def check_pods(template: dict[str, Any]) -> None:
    """Raises what is wrong with a pod template."""
    manifest = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_every_manifest_is_valid_to_the_last_field(example: Any) -> None:
    assert len(example.objects) >= 15
    for manifest in example.objects:
        check(manifest)


def test_so_is_everything_that_can_be_switched_on(render: Any) -> None:
    pod = {
        "annotations": {"a": "b"},
        "labels": {"c": "d"},
        "affinity": {"nodeAffinity": {}},
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
        "extraEnv": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
    }
    values = {
        "image": {"digest": "sha256:" + "0" * 64},
        "imagePullSecrets": [{"name": "registry"}],
        "model": {"source": "imageVolume", "reference": "example.com/model:1"},
        "rdma": {"enabled": True, "hostNetwork": True, "resources": {"rdma/hca": 1}},
        "tls": {"enabled": True, "existingSecret": "tls"},
        "networkPolicy": {"nodeCIDRs": ["10.0.0.0/24", "fd00::/64"]},
        "pool": {"sharedMemory": {"enabled": True}, "hugepages": {"amount": "4Gi"}, "pod": pod},
        "frontend": {"pod": pod, "service": {"type": "LoadBalancer", "annotations": {"x": "y"}}},
        "conductor": {"pod": pod, "persistence": {"enabled": True, "storageClassName": "fast"}},
        "workerPod": pod,
        "workers": {
            "both": {"role": "aggregated", "autoscaling": {"enabled": True, "minReplicas": 1, "maxReplicas": 3}},
        },
        "serviceAccount": {"annotations": {"e": "f"}},
        "monitoring": {"tracing": {"endpoint": "http://collector:4318"}},
        "joinToken": {"existingSecret": "join"},
        "ray": {"existingTokenSecret": "ray-token", "head": pod, "launcher": pod},
    }
    values["workers"]["more"] = {"role": "decode", "autoscaling": {"enabled": True, "minReplicas": 1, "maxReplicas": 3}}
    downloaded = {
        "source": "huggingface",
        "id": "a/b",
        "token": {"existingSecret": "hub"},
        "cache": {"sizeLimit": "9Gi"},
    }
    for model in (values["model"], downloaded):
        for manifest in render({"mode": "kuberay", **values, "model": model}).objects:
            check(manifest)
    cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 50}}
    values["workers"]["both"]["autoscaling"]["metrics"] = [{"type": "Resource", "resource": cpu}]  # type: ignore[index]
    for model in (values["model"], downloaded):
        for manifest in render({**values, "model": model}).objects:
            check(manifest)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("Deployment", ("spec", "template", "spec")),
        ("RayCluster", ("spec",)),
        ("RayCluster", ("spec", "workerGroupSpecs", 0)),
        ("RayCluster", ("spec", "workerGroupSpecs", 0, "template", "spec")),
        ("ConfigMap", ()),
    ],
)
def test_a_field_that_is_unknown_is_noticed(render: Any, kind: str, path: tuple[Any, ...]) -> None:
    manifest = copy.deepcopy(render({"mode": "kuberay"}).kind(kind)[0])
    check(manifest)
    place = manifest
    for step in path:
        place = place[step]
    place["nonsense"] = 1
    with pytest.raises(jsonschema.ValidationError):
        check(manifest)


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_selectors_find_pods_and_ports_are_there(example: Any) -> None:
    pods = example.pods
    for service in example.kind("Service"):
        found = [pod for pod in pods if matches(service["spec"]["selector"], pod.labels)]
        assert found, service["metadata"]["name"]
        for pod in found:
            named = {port["name"] for port in pod.container["ports"]}
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= named
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        for one in example.kind(kind):
            selector = one["spec"].get("selector", one["spec"].get("podSelector"))["matchLabels"]
            assert any(matches(selector, pod.labels) for pod in pods)
    for workload in (*example.kind("Deployment"), *example.kind("StatefulSet"), *example.kind("DaemonSet")):
        selector = workload["spec"]["selector"]["matchLabels"]
        # Two workloads that select the same pods would fight over them.
        assert [pod.name for pod in pods if matches(selector, pod.labels)] == [workload["metadata"]["name"]]
    for monitor in example.kind("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        (service,) = [one for one in example.kind("Service") if matches(wanted, one["metadata"]["labels"])]
        ports = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports


@pytest.mark.parametrize("mode", ["statefulset", "kuberay"])
def test_every_process_is_scraped_once_and_a_policy_lets_prometheus_in(render: Any, mode: str) -> None:
    prometheus = {"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}
    policy = {"monitoringFrom": [prometheus], "frontendFrom": [{"podSelector": {}}]}
    values = {"mode": mode, "networkPolicy": policy, "monitoring": {"serviceMonitor": {"enabled": True}}}
    release = render(values)
    (pods,) = release.kind("PodMonitor")
    wanted = pods["spec"]["selector"]["matchLabels"]
    scraped = {
        pod.labels["app.kubernetes.io/component"]
        for pod in release.pods
        if matches(wanted, pod.labels) and "system" in {port["name"] for port in pod.container.get("ports", ())}
    }
    assert scraped == {"conductor"} | ({"pool", "prefill", "decode"} if mode == "statefulset" else set())
    # Of the conductors, one exports the series of all nodes where these have no port; every pod has one path.
    names = ["moonpool-conductor-0", "moonpool-conductor-1", "moonpool-conductor-10", "moonpool-decode-0"]
    paths = {
        name: [endpoint["path"] for endpoint in pods["spec"]["podMetricsEndpoints"] if is_kept(endpoint, name)]
        for name in names
    }
    first = ["/metrics"] if mode == "statefulset" else ["/metrics/cluster"]
    assert paths == {name: ["/metrics"] for name in names} | {"moonpool-conductor-0": first}
    metrics = release.one("NetworkPolicy", "moonpool-metrics")["spec"]
    assert metrics["podSelector"]["matchLabels"] == wanted
    assert metrics["ingress"] == [{"ports": [{"protocol": "TCP", "port": "system"}], "from": [prometheus]}]
    policy = {"frontendFrom": [{"podSelector": {}}]}
    fallback = render({**values, "networkPolicy": policy}).one("NetworkPolicy", "moonpool-metrics")["spec"]
    assert fallback["ingress"][0]["from"] == policy["frontendFrom"]
    assert "moonpool-metrics" not in {one["metadata"]["name"] for one in render().kind("NetworkPolicy")}


def is_kept(endpoint: dict[str, Any], pod: str) -> bool:
    rules = endpoint.get("relabelings", ())
    return all((re.fullmatch(rule["regex"], pod) is not None) == (rule["action"] == "keep") for rule in rules)


def test_conductors_name_tenants_in_metrics_only_where_that_is_chosen(render: Any) -> None:
    monitor = {"serviceMonitor": {"enabled": True, "tenants": True}}
    assert "--metrics-tenants" in render({"monitoring": monitor}).pod("moonpool-conductor").container["args"]
    assert "--metrics-tenants" not in render().pod("moonpool-conductor").container["args"]


def test_what_is_referred_to_exists(example: Any) -> None:
    config_maps = {one["metadata"]["name"] for one in example.kind("ConfigMap")}
    accounts = {one["metadata"]["name"] for one in example.kind("ServiceAccount")}
    for pod in example.pods:
        spec, volumes = pod.spec, {volume["name"] for volume in pod.spec["volumes"]}
        claimed = {"state"} if "conductor" in pod.name else set()
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes | claimed
        assert {v["configMap"]["name"] for v in spec["volumes"] if "configMap" in v} <= config_maps
        assert spec["serviceAccountName"] in accounts
    workloads = {(one["kind"], one["metadata"]["name"]) for one in example.objects}
    for scaler in (*example.kind("HorizontalPodAutoscaler"), *example.kind("ScaledObject")):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in workloads
        assert "replicas" not in example.one(target["kind"], target["name"])["spec"]


def test_pods_have_no_rights_that_they_do_not_need(example: Any) -> None:
    for pod in example.pods:
        spec = pod.spec
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        locks = "IPC_LOCK" in pod.container["securityContext"]["capabilities"].get("add", [])
        assert spec["securityContext"]["runAsNonRoot"] or locks
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["capabilities"]["drop"] == ["ALL"]
            assert container["resources"]["limits"]["memory"]


def test_kubernetes_adds_no_variables_of_a_service_which_roles_would_refuse(example: Any) -> None:
    assert {pod.spec["enableServiceLinks"] for pod in example.pods} == {False}


def test_names_stay_short_enough_for_the_folder_of_sockets(render: Any) -> None:
    release = render(
        {"pool": {"sharedMemory": {"enabled": True}}, "workers": {"a" * 12: {"role": "decode", "replicas": 100}}},
        name="r" * 53,
    )
    longest = max(len(one["metadata"]["name"]) for one in release.kind("StatefulSet")) + len("-99")
    assert len("/run/moonpool/") + longest <= 107 - 1 - 40
    for manifest in release.objects:
        check(manifest)


def test_two_releases_of_a_namespace_share_no_name(render: Any) -> None:
    one, other = (
        {(m["kind"], m["metadata"]["name"]) for m in render({}, name=name).objects} for name in ("one", "other")
    )
    assert not one & other
