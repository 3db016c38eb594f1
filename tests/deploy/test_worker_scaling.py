"""Autoscalers of groups of workers: KEDA, HorizontalPodAutoscalers of LeaderWorkerSets, and Ray's."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from telemetry.conductor import CONDUCTOR_METRICS

KEDA = {"serverAddress": "http://prometheus:9090"}
Told = Callable[[Any], Any]  # the settings of a release's processes, as they read them


def scaled(role: str, *, least: int = 1, most: int = 5, **own: Any) -> dict[str, Any]:
    """A group with a ScaledObject."""
    return {"role": role, "autoscaling": {"keda": {"enabled": True}, "minReplicas": least, "maxReplicas": most}, **own}


def hpa_scaled(role: str, least: int, most: int) -> dict[str, Any]:
    """A group with a HorizontalPodAutoscaler, or with Ray's autoscaler."""
    return {"role": role, "autoscaling": {"enabled": True, "minReplicas": least, "maxReplicas": most}}


def with_metrics(group: dict[str, Any]) -> dict[str, Any]:
    return group | {"autoscaling": group["autoscaling"] | {"metrics": [{"type": "Resource"}]}}


def with_fallback(group: dict[str, Any]) -> dict[str, Any]:
    fallback = {"keda": {"fallback": {"failureThreshold": 3, "replicas": 2}}}
    return group | {"autoscaling": group["autoscaling"] | fallback}


def trigger(release: Any, name: str) -> dict[str, Any]:
    (found,) = release.one("ScaledObject", name)["spec"]["triggers"]
    assert found["type"] == "prometheus"
    return dict(found)


def refused(render: Any, values: dict[str, Any]) -> str:
    with pytest.raises(Exception) as error:
        render(values)
    assert type(error.value).__name__.startswith("Helm")
    return str(error.value)


def test_keda_follows_what_the_conductors_compute(render: Any) -> None:
    release = render(
        {"workers": {"decode": scaled("decode", least=2, most=7)}, "keda": KEDA, "model": {"servedNames": ["large"]}}
    )
    spec = release.one("ScaledObject", "moonpool-decode")["spec"]
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "moonpool-decode"}
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 7)
    assert spec["pollingInterval"] == 15
    assert "fallback" not in spec
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior == {"scaleDown": {"stabilizationWindowSeconds": 0}}
    found = trigger(release, "moonpool-decode")
    labels = 'namespace="llm",pod=~"moonpool-conductor-[0-9]+",model_name="large",role="decode"'
    assert found == {
        "type": "prometheus",
        "metadata": {
            "serverAddress": "http://prometheus:9090",
            "query": f"max(moonpool:desired_nodes{{{labels}}})",
            "threshold": "1",
            "ignoreNullValues": "false",
        },
    }
    assert CONDUCTOR_METRICS["desired_nodes"][1] == ("model_name", "role")
    assert "replicas" not in release.one("StatefulSet", "moonpool-decode")["spec"]
    assert release.one("StatefulSet", "moonpool-prefill")["spec"]["replicas"] == 1
    assert not release.kind("HorizontalPodAutoscaler")


def test_nothing_of_keda_is_made_unasked(render: Any) -> None:
    assert not render({"keda": KEDA}).kind("ScaledObject")


def test_groups_of_a_fleet_follow_the_demand_of_their_own_model(
    render: Any, example_values: Callable[[str], dict[str, Any]]
) -> None:
    release = render(example_values("fleet"))
    asked = {}
    for one in release.kind("ScaledObject"):
        query = trigger(release, one["metadata"]["name"])["metadata"]["query"]
        asked[one["spec"]["scaleTargetRef"]["name"]] = dict(re.findall(r'(model_name|role)="(\w+)"', query))
    assert asked == {
        "moonpool-large-prefill": {"model_name": "large", "role": "prefill"},
        "moonpool-large-decode": {"model_name": "large", "role": "decode"},
        "moonpool-medium-prefill": {"model_name": "medium", "role": "prefill"},
        "moonpool-medium-burst": {"model_name": "medium", "role": "decode"},
        "moonpool-small-both": {"model_name": "small", "role": "aggregated"},
    }
    burst = release.one("ScaledObject", "moonpool-medium-burst")["spec"]
    assert burst["fallback"] == {"failureThreshold": 4, "replicas": 2}


def test_workers_of_other_groups_of_the_role_are_subtracted(render: Any) -> None:
    fixed = {"replicas": 2, "leaderWorkerSet": {"size": 3}}
    release = render({"workers": {"decode": fixed, "burst": scaled("decode")}, "keda": KEDA})
    query = trigger(release, "moonpool-burst")["metadata"]["query"]
    assert re.fullmatch(r"clamp_min\(max\(moonpool:desired_nodes\{.+\}\) - 6, 0\)", query)


def test_a_replica_of_a_leader_worker_set_is_as_many_nodes_as_it_has_pods(render: Any) -> None:
    size: dict[str, Any] = {"leaderWorkerSet": {"size": 4}}
    target = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": "moonpool-prefill"}
    release = render({"workers": {"prefill": scaled("prefill", **size)}, "keda": KEDA})
    assert release.one("ScaledObject", "moonpool-prefill")["spec"]["scaleTargetRef"] == target
    assert trigger(release, "moonpool-prefill")["metadata"]["threshold"] == "4"
    assert "replicas" not in release.one("LeaderWorkerSet", "moonpool-prefill")["spec"]
    release = render({"workers": {"prefill": hpa_scaled("prefill", 1, 3) | size}})
    (scaler,) = release.kind("HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"] == target
    assert scaler["spec"]["metrics"][0]["external"]["target"]["averageValue"] == "4"


def test_a_name_stays_one_string_of_the_query(render: Any) -> None:
    values = {"workers": {"decode": scaled("decode")}, "keda": KEDA, "model": {"servedNames": ['a"} or b{"\\']}}
    query = trigger(render(values), "moonpool-decode")["metadata"]["query"]
    assert 'model_name="a\\"} or b{\\"\\\\",role="decode"}' in query


def test_prometheus_may_ask_for_credentials(render: Any) -> None:
    keda = KEDA | {"triggerMetadata": {"authModes": "bearer"}, "authenticationRef": {"name": "prometheus"}}
    found = trigger(render({"workers": {"decode": scaled("decode")}, "keda": keda}), "moonpool-decode")
    assert found["authenticationRef"] == {"name": "prometheus", "kind": "TriggerAuthentication"}
    assert found["metadata"]["authModes"] == "bearer"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {
                "workers": {"decode": {"autoscaling": {**scaled("decode")["autoscaling"], "enabled": True}}},
                "keda": KEDA,
            },
            r"workers\.decode\.autoscaling: enabled \(a HorizontalPodAutoscaler\) and keda\.enabled conflict, since",
        ),
        (
            {"workers": {"decode": scaled("decode")}},
            r"workers\.decode\.autoscaling\.keda needs keda\.serverAddress, which is empty: set it to the URL of",
        ),
        (
            {"workers": {"decode": {"autoscaling": {"keda": {"enabled": True}, "minReplicas": 1}}}, "keda": KEDA},
            r"workers\.decode\.autoscaling\.maxReplicas is missing: set the smallest and the largest number",
        ),
        (
            {"workers": {"decode": scaled("decode", least=3, most=2)}, "keda": KEDA},
            r"workers\.decode\.autoscaling: minReplicas is 3, maxReplicas must not be smaller, got 2",
        ),
        (
            {"workers": {"decode": scaled("decode"), "more": scaled("decode")}, "keda": KEDA},
            r"workers\.decode\.autoscaling\.keda conflicts with workers\.more\.autoscaling: both groups have the role",
        ),
        (
            {"workers": {"decode": hpa_scaled("decode", 1, 2), "more": hpa_scaled("decode", 1, 2)}},
            r"workers\.decode\.autoscaling conflicts with workers\.more\.autoscaling: both groups have the role",
        ),
        (
            {"workers": {"decode": hpa_scaled("decode", 1, 2), "more": with_metrics(hpa_scaled("decode", 1, 2))}},
            r"workers\.decode\.autoscaling conflicts with workers\.more\.autoscaling: both groups have the role",
        ),
        (
            {"workers": {"decode": hpa_scaled("decode", 1, 2), "more": scaled("decode")}, "keda": KEDA},
            r"workers\.decode\.autoscaling conflicts with workers\.more\.autoscaling: both groups have the role",
        ),
        (
            {"workers": {"decode": with_metrics(scaled("decode"))}, "keda": KEDA},
            r"workers\.decode\.autoscaling: metrics and keda\.enabled conflict, since a ScaledObject follows",
        ),
        (
            {"workers": {"decode": with_fallback(hpa_scaled("decode", 1, 2))}},
            r"workers\.decode\.autoscaling: keda\.fallback and enabled conflict, since a HorizontalPodAutoscaler",
        ),
        (
            {"mode": "kuberay", "workers": {"decode": with_fallback(hpa_scaled("decode", 1, 2))}},
            r"workers\.decode\.autoscaling: keda\.fallback and enabled conflict, since a HorizontalPodAutoscaler",
        ),
        (
            {"workers": {"both": hpa_scaled("aggregated", 1, 2)}},
            r"workers\.both\.autoscaling needs a model with aggregated workers only, but it has a group",
        ),
        (
            {"workers": {"decode": hpa_scaled("decode", 1, 2)}, "config": {"role_switching": "act"}},
            r"workers\.decode\.autoscaling and config\.role_switching act conflict, since both respond to",
        ),
        (
            {"workers": {"both": scaled("aggregated")}, "keda": KEDA},
            r"workers\.both\.autoscaling\.keda needs a model with aggregated workers only, but it has a group",
        ),
        (
            {"workers": {"decode": scaled("decode")}, "keda": KEDA, "config": {"role_switching": "act"}},
            r"workers\.decode\.autoscaling and config\.role_switching act conflict, since both respond to",
        ),
        (
            {"mode": "kuberay", "workers": {"decode": scaled("decode")}, "keda": KEDA},
            r"workers\.decode\.autoscaling\.keda needs mode statefulset, got kuberay: there Ray's autoscaler adds pods",
        ),
        (
            {"mode": "kuberay", "workers": {"decode": with_metrics(hpa_scaled("decode", 1, 2))}},
            r"workers\.decode\.autoscaling\.metrics needs mode statefulset, got kuberay",
        ),
        ({"keda": {"serverAddress": "prometheus:9090"}}, r"'/keda/serverAddress': 'prometheus:9090' does not match"),
        (
            {"keda": {"triggerMetadata": {"query": "1"}}},
            r"keda\.triggerMetadata must not contain query, which the chart sets",
        ),
        ({"frontend": {"autoscaling": {"keda": {"enabled": True}}}}, r"additional properties 'keda' not allowed"),
        ({"ray": {"autoscaler": {"idleTimeoutSeconds": 0}}}, r"'/ray/autoscaler/idleTimeoutSeconds': minimum: got 0"),
    ],
)
def test_autoscalers_that_contradict_each_other_are_refused(render: Any, values: dict[str, Any], said: str) -> None:
    assert re.search(said, refused(render, values))


def test_groups_of_a_role_may_each_have_an_autoscaler_with_metrics_of_their_own(render: Any) -> None:
    group = with_metrics(hpa_scaled("decode", 1, 2))
    values = {"workers": {"decode": group, "more": group}, "config": {"role_switching": "act"}}
    assert len(render(values).kind("HorizontalPodAutoscaler")) == 2


RAY = {
    "mode": "kuberay",
    "workers": {
        "prefill": hpa_scaled("prefill", 1, 4),
        "decode": {"replicas": 2},
        "more": hpa_scaled("decode", 1, 3),
    },
}


def test_ray_may_add_pods_of_a_group_within_its_bounds(render: Any) -> None:
    (ray,) = render(RAY).kind("RayCluster")
    assert ray["spec"]["enableInTreeAutoscaling"] is True
    options = ray["spec"]["autoscalerOptions"]
    assert (options["version"], options["idleTimeoutSeconds"]) == ("v2", 300)
    groups = {group["groupName"]: group for group in ray["spec"]["workerGroupSpecs"]}
    bounds = {name: (group["minReplicas"], group["maxReplicas"]) for name, group in groups.items()}
    assert bounds == {"prefill": (1, 4), "decode": (2, 2), "more": (1, 3)}
    # The autoscaler sets the number itself.
    assert {name for name, group in groups.items() if "replicas" in group} == {"decode"}
    (ray,) = render({"mode": "kuberay"}).kind("RayCluster")
    assert not {"enableInTreeAutoscaling", "autoscalerOptions"} & ray["spec"].keys()


def test_rays_autoscaler_reads_the_groups_as_the_launcher_asks_for_them(render: Any) -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    (ray,) = render(RAY).kind("RayCluster")
    found = _derive_autoscaling_config_from_ray_cr(ray)
    types = {name: kind for name, kind in found["available_node_types"].items() if name in RAY["workers"]}
    assert {name: (kind["min_workers"], kind["max_workers"]) for name, kind in types.items()} == {
        "prefill": (1, 4),
        "decode": (2, 2),
        "more": (1, 3),
    }
    offered = {name: {key for key in kind["resources"] if "moonpool" in key} for name, kind in types.items()}
    assert offered["prefill"] == {"moonpool_prefill", "moonpool_pool"}
    assert offered["decode"] == offered["more"] == {"moonpool_decode", "moonpool_pool"}
    assert found["idle_timeout_minutes"] == 5


def test_the_launcher_follows_the_demand_within_the_bounds_of_all_groups_of_a_role(render: Any, told: Told) -> None:
    release = render(RAY)
    serve = told(release).settings(release.pod("moonpool-launcher"))
    assert (serve.topology.num_prefill, serve.topology.num_decode) == (1, 3)
    assert serve.supervisor.autoscale == ("decode=3:5", "prefill=1:4")
    release = render({"mode": "kuberay"})
    assert told(release).settings(release.pod("moonpool-launcher")).supervisor.autoscale == ()


def test_only_rays_autoscaler_has_a_token_of_kubernetes(render: Any) -> None:
    release = render(RAY)
    accounts = {pod.name: pod.spec["serviceAccountName"] for pod in release.pods}
    assert {name for name, account in accounts.items() if account == "moonpool-ray"} == {"moonpool-ray-head"}
    assert {one["metadata"]["name"] for one in release.kind("ServiceAccount")} == {"moonpool", "moonpool-ray"}
    head = release.pod("moonpool-ray-head")
    assert {pod.spec["automountServiceAccountToken"] for pod in release.pods} == {False}
    (token,) = [volume for volume in head.spec["volumes"] if "projected" in volume]
    assert token["name"] not in {mount["name"] for mount in head.container["volumeMounts"]}
    (ray,) = release.kind("RayCluster")
    mounts = {mount["name"]: mount["mountPath"] for mount in ray["spec"]["autoscalerOptions"]["volumeMounts"]}
    assert mounts[token["name"]] == "/var/run/secrets/kubernetes.io/serviceaccount"
    own = render(RAY | {"serviceAccount": {"create": False, "name": "mine"}})
    assert own.pod("moonpool-ray-head").spec["serviceAccountName"] == "mine"
    assert not own.kind("ServiceAccount")


def test_rays_autoscaler_sends_the_clusters_token(render: Any) -> None:
    (ray,) = render(RAY | {"ray": {"existingTokenSecret": "secret"}}).kind("RayCluster")
    variables = {one["name"]: one for one in ray["spec"]["autoscalerOptions"]["env"]}
    assert variables["RAY_AUTH_MODE"]["value"] == "token"
    assert variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "secret"
