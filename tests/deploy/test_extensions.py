"""The chart takes volumes, init containers, variables, objects and a route from platform teams, and tests itself."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

VOLUME = {"name": "certificates", "secret": {"secretName": "company-ca"}}
MOUNT = {"name": "certificates", "mountPath": "/etc/company", "readOnly": True}
INIT = {"name": "wait", "image": "busybox:1.36", "command": ["true"]}
FROM = {"secretRef": {"name": "proxy"}}
POD = {
    "extraVolumes": [VOLUME],
    "extraVolumeMounts": [MOUNT],
    "initContainers": [INIT],
    "envFrom": [FROM],
    "schedulerName": "volcano",
}


@pytest.mark.parametrize("mode", ["statefulset", "kuberay"])
def test_every_role_takes_volumes_init_containers_variables_and_a_scheduler(render: Any, mode: str) -> None:
    release = render(
        {"mode": mode, **{role: {"pod": POD} for role in ("frontend", "conductor", "pool")}, "workerPod": POD}
    )
    others = ("redis", "head", "launcher")  # with values of their own
    pods = [pod for pod in release.pods if not pod.name.endswith(others)]
    assert len(pods) >= 4
    for pod in pods:
        assert VOLUME in pod.spec["volumes"], pod.name
        assert MOUNT in pod.container["volumeMounts"], pod.name
        assert INIT in pod.spec["initContainers"], pod.name
        assert FROM in pod.container["envFrom"], pod.name
        assert pod.spec["schedulerName"] == "volcano", pod.name


def test_a_mount_without_a_path_is_refused_by_name(render: Any) -> None:
    with pytest.raises(Exception, match="mountPath"):
        render({"conductor": {"pod": {"extraVolumeMounts": [{"name": "certificates"}]}}})


def test_further_objects_are_templates(render: Any) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "{{ .Release.Name }}-extra"}}
    (found,) = render({"extraObjects": [secret]}).kind("Secret")
    assert found["metadata"]["name"] == "moonpool-extra"


def test_a_route_of_the_gateway_api_leads_to_the_frontends(render: Any) -> None:
    route = {
        "enabled": True,
        "parentRefs": [{"name": "public", "namespace": "gateways"}],
        "hostnames": ["llm.example.org"],
    }
    found = render({"frontend": {"httpRoute": route, "service": {"port": 8080}}}).one("HTTPRoute", "moonpool-frontend")
    assert found["spec"]["parentRefs"] == route["parentRefs"]
    assert found["spec"]["hostnames"] == route["hostnames"]
    (rule,) = found["spec"]["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    assert rule["backendRefs"] == [{"name": "moonpool-frontend", "port": 8080}]
    assert rule["timeouts"] == {"request": "0s"}


def test_a_route_without_a_gateway_is_refused(render: Any) -> None:
    with pytest.raises(Exception, match="parentRefs"):
        render({"frontend": {"httpRoute": {"enabled": True}}})


def test_the_chart_s_test_asks_every_process_and_sends_a_request_with_its_key(render: Any) -> None:
    release = render({"test": {"apiKey": {"existingSecret": "tester"}}})
    pod = release.one("Pod", "moonpool-test")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    doctor, request = pod["spec"]["containers"]
    assert doctor["args"][:2] == ["doctor", "--cluster"]
    assert request["args"][:2] == ["bench", "serve"]
    key = yaml.safe_load("{name: MOONPOOL_API_KEY, valueFrom: {secretKeyRef: {name: tester, key: api-key}}}")
    assert key in request["env"]
    assert pod["spec"]["restartPolicy"] == "Never"
