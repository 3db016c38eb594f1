"""The processes accept what the chart gives them: flags, file, variables, ports, probes, objectives."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from conductor.policy.objectives import record_to_plain
from frontend.api.openapi import describe
from moonpool.config import ServeConfig
from moonpool.role_configs import conductor_config
from moonpool.role_process.health import health_answers
from moonpool.role_process.roles import ROLES

POD_IP = "10.1.2.3"  # as the processes are told
COMPOSITES = {role.command: role.composite for role in ROLES} | {"serve": ServeConfig}
Told = Callable[[Any], Any]  # the settings of a release's processes, as they read them
FIXED_ROLES = {"conductor": "conductor", "frontend": "frontend", "pool": "pool-node", "launcher": "serve"}


def role_of(pod: Any) -> str | None:
    if pod.labels.get("moonpool/kind") == "worker":
        return f"{pod.labels['llm-d.ai/role'].replace('both', 'aggregated')}-node"
    return FIXED_ROLES.get(pod.name.removeprefix("moonpool-"))


def test_every_process_understands_what_it_is_told(example: Any, told: Told) -> None:
    reader, roles = told(example), set()
    for pod in example.pods:
        role = role_of(pod)
        if role is not None:
            assert type(reader.settings(pod)) is COMPOSITES[role]
            roles.add(role)
    assert {"conductor", "frontend"} < roles
    workers = [{"prefill-node", "decode-node"}, {"aggregated-node"}]
    assert ("serve" in roles) != ("pool-node" in roles and any(needed <= roles for needed in workers))


def test_nodes_are_told_all_conductors_by_the_names_that_these_have(example: Any, told: Told) -> None:
    conductors = example.one("StatefulSet", "moonpool-conductor")
    service, count = conductors["spec"]["serviceName"], conductors["spec"]["replicas"]
    assert example.one("Service", service)["spec"]["clusterIP"] == "None"
    expected = tuple(f"moonpool-conductor-{i}.{service}.llm.svc:7000" for i in range(count))
    reader = told(example)
    assert reader.settings(example.pod("moonpool-conductor")).listen.listen == "0.0.0.0:7000"
    for pod in example.pods:
        role = role_of(pod)
        if role == "serve":
            assert reader.settings(pod).runtime.join == expected
        elif role not in (None, "conductor"):
            assert reader.settings(pod).conductor.conductor == expected


def test_ports_and_addresses_are_those_that_others_dial(example: Any, told: Told) -> None:
    reader = told(example)
    for pod in example.pods:
        role, ports = role_of(pod), {port["name"]: port["containerPort"] for port in pod.container.get("ports", ())}
        if role in (None, "serve"):
            continue
        settings = reader.settings(pod)
        if role == "frontend":
            assert (settings.http.host, ports) == ("0.0.0.0", {"http": settings.http.port})
            continue
        listened = int(settings.listen.listen.rpartition(":")[2])
        assert (ports["grpc"], ports["system"]) == (listened, settings.health.address[1])
        if role != "conductor":
            assert settings.host.advertise == f"{POD_IP}:{listened}"
            assert (settings.transport.data_host, settings.host.data_port) == (POD_IP, ports["kv"])
        if role not in ("conductor", "pool-node"):
            service, _, port = settings.worker.pool.partition(":")
            local = example.one("Service", service.partition(".")[0])["spec"]
            assert local["internalTrafficPolicy"] == "Local"
            assert [one["port"] for one in local["ports"]] == [int(port)]


def test_probes_ask_what_is_answered(example: Any) -> None:
    asked: dict[bool, set[str]] = {True: set(), False: set()}
    for pod in example.pods:
        role, ports = role_of(pod), {port["name"] for port in pod.container.get("ports", ())}
        if role in (None, "serve"):
            continue
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            get = pod.container[probe]["httpGet"]
            assert get["port"] in ports
            asked[role == "frontend"].add(get["path"])
    assert asked[True] <= set(describe(asks_for_key=False)["paths"])

    def known(port: int, path: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30):
                return True
        except urllib.error.HTTPError as error:
            with error:
                return error.code != 404

    async def all_known() -> bool:
        async with health_answers(("127.0.0.1", 0), "n", asyncio.Event()) as (port, _):
            assert not await asyncio.to_thread(known, port, "/nothing")
            return all([await asyncio.to_thread(known, port, path) for path in asked[False]])

    assert asyncio.run(all_known())


def test_a_secret_reaches_the_process_that_needs_it_and_no_manifest(render: Any, told: Told) -> None:
    release = render(
        {
            "redis": {"enabled": False},
            "externalRedis": {"url": "rediss://user@redis.example.com/3", "existingSecret": "redis"},
        }
    )
    reader = told(release)
    conductor = conductor_config(reader.settings(release.pod("moonpool-conductor")), "c")
    assert conductor.shared_store.redis_url == "rediss://user:a-secret@redis.example.com/3"
    assert not release.kind("Secret")
    assert not [one for one in release.objects if one["metadata"]["name"].endswith("-redis")]
    assert "a-secret" not in json.dumps(release.objects)


def test_without_redis_conductors_are_told_of_none(render: Any) -> None:
    assert "redis_url" not in render({"redis": {"enabled": False}}).settings


def test_the_record_of_objectives_is_what_the_conductor_begins_with(render: Any, told: Told) -> None:
    record = {"cluster": {"ttft": "2s"}, "classes": {"batch": {"tbt": "off", "priority": 10}}, "headers": "tighten"}
    release = render({"slo": {"record": record}})
    found = conductor_config(told(release).settings(release.pod("moonpool-conductor")), "c")
    assert found.objectives is not None
    assert record_to_plain(found.objectives) == record
    assert not found.slo.slo_force


def test_another_record_of_objectives_restarts_nobody(render: Any) -> None:
    one, other = (render({"slo": {"record": {"cluster": {"ttft": ttft}}}}) for ttft in ("2s", "3s"))
    assert [pod.template for pod in one.pods] == [pod.template for pod in other.pods]
    assert one.file("moonpool-slo", "slo.yaml") != other.file("moonpool-slo", "slo.yaml")


def test_another_setting_restarts_every_role(render: Any) -> None:
    one, other = (render({"config": {"block_tokens": tokens}}) for tokens in (16, 32))
    changed = {a.name for a, b in zip(one.pods, other.pods, strict=True) if a.template != b.template}
    assert changed == {pod.name for pod in one.pods} - {"moonpool-redis"}


def test_large_whole_numbers_stay_whole(render: Any, told: Told) -> None:
    release = render({"config": {"capacity_tokens": 16_000_000, "answer_memory": 34_359_738_368, "max_queue": 0.5}})
    settings = told(release).settings(release.pod("moonpool-decode"))
    assert settings.engine.capacity_tokens == 16_000_000
    assert told(release).settings(release.pod("moonpool-frontend")).http.answer_memory_bytes == 34_359_738_368


def test_groups_in_the_hosts_network_have_ports_of_their_own(render: Any, told: Told) -> None:
    tls = {"enabled": True, "existingSecret": "tls"}
    policy = {"nodeCIDRs": ["10.0.0.0/24"]}
    release = render({"rdma": {"enabled": True, "hostNetwork": True}, "tls": tls, "networkPolicy": policy})
    ports = [
        port["containerPort"] for pod in release.pods if pod.spec.get("hostNetwork") for port in pod.container["ports"]
    ]
    assert len(ports) == 9
    assert len(set(ports)) == 9
    assert told(release).settings(release.pod("moonpool-prefill")).host.advertise.endswith(":7003")


def test_rdma_and_huge_pages_are_asked_of_kubernetes_and_told_to_the_roles(example: Any) -> None:
    asks = {pod.name for pod in example.pods if "rdma/hca_shared_devices_a" in pod.container["resources"]["limits"]}
    huge = {pod.name for pod in example.pods if "hugepages-2Mi" in pod.container["resources"]["limits"]}
    if "prefill_group_size" in example.settings:  # of 8p8d-rdma
        assert asks == {"moonpool-pool", "moonpool-prefill", "moonpool-decode"}
        assert huge == {"moonpool-pool"}
        assert example.settings["pool_hugepages"] == "on"
        pool = example.pod("moonpool-pool").container["resources"]
        assert pool["requests"]["memory"] == "16Gi"
        assert pool["limits"]["memory"] == "32Gi"
    else:
        assert not asks | huge


def test_ray_is_asked_for_the_workers_and_its_pods_offer_to_take_them(render: Any, told: Told) -> None:
    workers = {"prefill": {"replicas": 3}, "decode": {"replicas": 2}, "more": {"role": "decode", "replicas": 4}}
    release = render({"mode": "kuberay", "workers": workers})
    (ray,) = release.kind("RayCluster")
    offered: dict[str, int] = {}
    for group in ray["spec"]["workerGroupSpecs"]:
        text = group["rayStartParams"]["resources"]
        assert (text[0], text[-1]) == ("'", "'")  # for the shell that KubeRay starts Ray by
        for name, units in json.loads(text.strip("'")).items():
            offered[name] = offered.get(name, 0) + units * group["replicas"]
    assert offered == {"moonpool_prefill": 3, "moonpool_decode": 6, "moonpool_pool": 9}
    serve = told(release).settings(release.pod("moonpool-launcher"))
    assert (serve.topology.num_prefill, serve.topology.num_decode, serve.topology.aggregated) == (3, 6, 0)
    assert serve.runtime.is_ray
    assert serve.runtime.ray_orphan_grace_s == 600
    assert {pod.labels.get("llm-d.ai/role") for pod in release.pods} == {None, "prefill", "decode"}
    assert not release.kind("DaemonSet")


def test_keys_and_the_certificate_of_the_api_are_mounted_as_files(render: Any, told: Told) -> None:
    frontend = {"apiKeys": {"existingSecret": "keys", "key": "k.yaml"}, "tls": {"existingSecret": "web"}}
    monitor = {"enabled": True, "authorization": {"existingSecret": "scrape"}}
    release = render({"frontend": frontend, "monitoring": {"serviceMonitor": monitor}})
    pod = release.pod("moonpool-frontend")
    mounts = {mount["name"]: mount["mountPath"] for mount in pod.container["volumeMounts"] if "subPath" not in mount}
    volumes = {volume["name"]: volume.get("secret") for volume in pod.spec["volumes"]}
    http = told(release).settings(pod).http
    for name, secret, files in (
        ("keys", "keys", {http.api_keys_file: "k.yaml"}),
        ("https", "web", {http.http_tls_cert: "tls.crt", http.http_tls_key: "tls.key"}),
    ):
        assert volumes[name]["secretName"] == secret
        assert {f"{mounts[name]}/{item['path']}": item["key"] for item in volumes[name]["items"]} == {
            str(path): key for path, key in files.items()
        }
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert pod.container[probe]["httpGet"]["scheme"] == "HTTPS"
    (port,) = release.one("Service", "moonpool-frontend")["spec"]["ports"]
    assert port["appProtocol"] == "https"
    (found,) = release.kind("ServiceMonitor")
    (endpoint,) = found["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["authorization"] == {"credentials": {"name": "scrape", "key": "api-key"}}


def test_without_them_the_api_is_plain_and_asks_for_no_key(render: Any, told: Told) -> None:
    release = render({})
    pod = release.pod("moonpool-frontend")
    http = told(release).settings(pod).http
    assert (http.api_keys_file, http.http_tls_cert) == (None, None)
    assert "scheme" not in pod.container["livenessProbe"]["httpGet"]
