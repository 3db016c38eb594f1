"""Workers in the host's network, where no network policy applies to them, and the policies of what they call."""

import ipaddress
import re
from typing import Any

import pytest

NODES = ["10.1.0.0/16", "fd00:1::/64"]
IN_NODES, OUTSIDE = "10.1.2.3", "10.2.0.1"


def values(**other: Any) -> dict[str, Any]:
    return {
        "rdma": {"enabled": True, "hostNetwork": True},
        "tls": {"enabled": True, "existingSecret": "tls"},
        "ray": {"existingTokenSecret": "ray"},
        "networkPolicy": {"nodeCIDRs": NODES},
        **other,
    }


def admits(release: Any, pod: Any, port: int, address: str) -> bool:
    """Judge a connection from an address outside all pods as Kubernetes does: policies only add to each other."""
    named = {each["name"]: each["containerPort"] for each in pod.container.get("ports", ())}
    applying = [policy["spec"] for policy in release.kind("NetworkPolicy") if selects(policy["spec"], pod)]
    if pod.spec.get("hostNetwork") or not applying:
        return True
    return any(
        is_from(rule.get("from"), address) and any(is_port(each, port, named) for each in rule.get("ports", [{}]))
        for spec in applying
        for rule in spec["ingress"]
    )


def selects(spec: dict[str, Any], pod: Any) -> bool:
    selector = spec["podSelector"]
    excluded = any(
        pod.labels.get(each["key"]) in each["values"] and each["operator"] == "NotIn"
        for each in selector.get("matchExpressions", ())
    )
    return bool(selector["matchLabels"].items() <= pod.labels.items()) and not excluded


def is_from(peers: list[dict[str, Any]] | None, address: str) -> bool:
    if peers is None:
        return True
    blocks = [ipaddress.ip_network(peer["ipBlock"]["cidr"]) for peer in peers if "ipBlock" in peer]
    return any(ipaddress.ip_address(address) in block for block in blocks)


def is_port(wanted: dict[str, Any], port: int, named: dict[str, int]) -> bool:
    if "port" not in wanted:
        return True
    first = named.get(wanted["port"], -1) if isinstance(wanted["port"], str) else wanted["port"]
    return bool(first <= port <= wanted.get("endPort", first))


def admitted(release: Any, address: str) -> set[tuple[str, int]]:
    """Every (pod, port) that an address outside the pods' network may connect to; host-network pods left out."""
    ports = {22, 6378, 6379, 6380, 6381, 6382, 7000, 7001, 8000, 8080, 8081, 10001, 10002, 10101, 10102}
    pods = [pod for pod in release.pods if not pod.spec.get("hostNetwork")]
    return {(pod.name, port) for pod in pods for port in ports if admits(release, pod, port, address)}


def test_only_the_nodes_networks_are_let_in_and_only_on_the_conductors_port(render: Any) -> None:
    release = render(values(frontend={"replicas": 1}))
    anyone = {("moonpool-frontend", 8000)}
    assert admitted(release, IN_NODES) == {("moonpool-conductor", 7000)} | anyone
    assert admitted(release, "fd00:1::7") == {("moonpool-conductor", 7000)} | anyone
    assert admitted(release, OUTSIDE) == anyone
    assert admitted(release, "fd00:2::7") == anyone


def test_without_the_hosts_network_no_address_outside_is_let_in(render: Any) -> None:
    release = render({"networkPolicy": {"nodeCIDRs": NODES}})
    assert admitted(release, IN_NODES) == admitted(release, OUTSIDE) == {("moonpool-frontend", 8000)}


def test_with_ray_its_fixed_ports_are_let_in_as_well(render: Any) -> None:
    release = render(values(mode="kuberay"))
    ray = {6380, 6381, 10002, 10101}
    assert admitted(release, IN_NODES) - {("moonpool-frontend", 8000)} == {
        ("moonpool-conductor", 7000),
        *(("moonpool-ray-head", port) for port in {6379, *ray}),
        *(("moonpool-launcher", port) for port in ray),
    }
    assert admitted(release, OUTSIDE) == {("moonpool-frontend", 8000)}
    (cluster,) = release.kind("RayCluster")
    fixed = {key: value for key, value in cluster["spec"]["headGroupSpec"]["rayStartParams"].items() if "port" in key}
    assert {int(value) for value in fixed.values()} == ray
    script = release.pod("moonpool-launcher").container["args"][0]
    assert dict(re.findall(r"--([a-z-]+-port)=(\d+)", script)) == fixed
    (cluster,) = render({"mode": "kuberay"}).kind("RayCluster")
    assert not [key for key in cluster["spec"]["headGroupSpec"]["rayStartParams"] if "port" in key]


@pytest.mark.parametrize("mode", ["statefulset", "kuberay"])
def test_the_risk_can_be_accepted_by_name_and_is_then_in_the_notes(render: Any, mode: str) -> None:
    accepted = {"enabled": True, "hostNetwork": True, "allowUnauthenticatedHostNetwork": True}
    release = render({"mode": mode, "rdma": accepted, "networkPolicy": {"enabled": False}})
    assert [pod for pod in release.pods if pod.spec.get("hostNetwork")]
    assert "! rdma.allowUnauthenticatedHostNetwork: anyone who can reach these hosts can call" in release.notes


def test_the_notes_name_what_no_policy_protects(render: Any) -> None:
    notes = render(values()).notes
    assert "! Workers and pool nodes run in the host's network, where no NetworkPolicy applies" in notes
    assert "admit connections from 10.1.0.0/16, fd00:1::/64 to the conductors" in notes
    assert "allowUnauthenticatedHostNetwork" not in notes
    assert "host's network" not in render({"tls": {"enabled": True, "existingSecret": "tls"}}).notes
