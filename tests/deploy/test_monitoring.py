"""Alerts and dashboards: what the chart's files hold reaches the cluster as it is."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml


def rules(chart: Path) -> list[dict[str, Any]]:
    return [
        rule
        for path in sorted((chart / "files" / "rules").glob("*.yaml"))
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    ]


def test_the_rules_arrive_as_they_are_written(render: Any, chart: Path) -> None:
    release = render({"monitoring": {"prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}}}})
    (found,) = release.kind("PrometheusRule")
    assert found["metadata"]["labels"]["release"] == "prometheus"
    assert [rule for group in found["spec"]["groups"] for rule in group["rules"]] == rules(chart)
    assert len(rules(chart)) >= 5


def test_alerts_lead_to_where_runbooks_are_read(render: Any, chart: Path) -> None:
    where = "https://git.example.org/moonpool/docs/runbooks.md"
    (found,) = render({"monitoring": {"prometheusRule": {"enabled": True, "runbooks": where}}}).kind("PrometheusRule")
    links = [
        rule["annotations"]["runbook_url"]
        for group in found["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    own = [rule["annotations"]["runbook_url"] for rule in rules(chart) if "alert" in rule]
    assert links == [link.replace("docs/runbooks.md", where) for link in own]
    assert all(link.startswith(f"{where}#") for link in links)


@pytest.fixture
def with_a_dashboard(chart: Path, tmp_path: Path) -> Path:
    """A copy of the chart with one dashboard more."""
    copy = tmp_path / "moonpool"
    shutil.copytree(chart, copy)
    text = json.dumps({"title": "Mine", "panels": [{"targets": [{"legendFormat": "{{node}}"}]}]}, indent=2)
    (copy / "files" / "dashboards" / "mine.json").write_text(text)
    return copy


def test_a_dashboard_becomes_a_config_map_that_grafana_finds(render: Any, with_a_dashboard: Path) -> None:
    dashboards = {"enabled": True, "labels": {"grafana_dashboard": "yes"}}
    release = render({"monitoring": {"dashboards": dashboards}}, folder=with_a_dashboard)
    found = release.one("ConfigMap", "moonpool-dashboard-mine")
    assert found["data"] == {"mine.json": (with_a_dashboard / "files" / "dashboards" / "mine.json").read_text()}
    assert found["metadata"]["labels"]["grafana_dashboard"] == "yes"


def test_nothing_of_it_is_made_unasked(render: Any) -> None:
    kinds = {one["kind"] for one in render().objects}
    assert not kinds & {
        "ServiceMonitor",
        "PodMonitor",
        "PrometheusRule",
        "Ingress",
        "HorizontalPodAutoscaler",
        "Certificate",
    }


def test_every_role_sends_its_spans_where_it_is_told_to_and_nowhere_unasked(render: Any) -> None:
    release = render({"monitoring": {"tracing": {"endpoint": "http://collector:4318", "share": 0.25}}})
    roles = [pod for pod in release.pods if pod.name != "moonpool-redis"]
    assert len(roles) == 5
    for pod in roles:
        told = {one["name"]: one.get("value") for one in pod.container["env"]}
        assert told["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4318"
        assert (told["OTEL_TRACES_SAMPLER"], told["OTEL_TRACES_SAMPLER_ARG"]) == ("parentbased_traceidratio", "0.25")
    assert "OTEL" not in json.dumps(render().objects)


def pod_monitors(render: Any, **values: Any) -> Any:
    monitoring = {"podMonitors": {"enabled": True, "roles": values.pop("roles", {})}, **values.pop("monitoring", {})}
    return render({"monitoring": monitoring, **values})


@pytest.mark.parametrize("mode", ["statefulset", "kuberay"])
def test_with_a_monitor_for_each_role_every_process_is_scraped_once(render: Any, mode: str) -> None:
    release = pod_monitors(render, mode=mode, endpointPicker={"enabled": True})
    assert not release.kind("ServiceMonitor")
    scraped: dict[str, list[str]] = {}
    for monitor in release.kind("PodMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (port,) = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
        for pod in release.pods:
            ports = {each["name"] for each in pod.container.get("ports", ())}
            if wanted <= pod.labels.items() and port in ports:
                role = monitor["metadata"]["name"].removeprefix("moonpool-")
                scraped.setdefault(pod.name.removeprefix("moonpool-"), []).append(role)
    ray = {role: [role] for role in ("conductor", "frontend", "endpoint-picker")}
    own = {"pool": ["pool"], "prefill": ["worker"], "decode": ["worker"]}
    assert scraped == (ray if mode == "kuberay" else ray | own)
    assert release.one("NetworkPolicy", "moonpool-metrics")["spec"]["ingress"][0]["ports"] == [
        {"protocol": "TCP", "port": "system"}
    ]
    conductors = release.one("PodMonitor", "moonpool-conductor")["spec"]["podMetricsEndpoints"]
    paths = ["/metrics"] if mode == "statefulset" else ["/metrics/cluster", "/metrics"]
    assert [endpoint["path"] for endpoint in conductors] == paths


def test_an_endpoint_picker_that_does_not_run_has_no_monitor(render: Any) -> None:
    names = {one["metadata"]["name"] for one in pod_monitors(render).kind("PodMonitor")}
    assert names == {f"moonpool-{role}" for role in ("frontend", "conductor", "pool", "worker")}


def test_a_role_may_be_scraped_otherwise_or_not_at_all(render: Any) -> None:
    drop = {"sourceLabels": ["__name__"], "regex": "process_.*", "action": "drop"}
    roles = {"conductor": {"interval": "5s", "labels": {"team": "a"}, "metricRelabelings": [drop]}, "pool": None}
    common = {"serviceMonitor": {"interval": "30s", "labels": {"release": "p"}}}
    release = pod_monitors(render, roles=roles, monitoring=common)
    found = {one["metadata"]["name"]: one for one in release.kind("PodMonitor")}
    assert found.keys() == {"moonpool-conductor", "moonpool-frontend", "moonpool-worker"}
    endpoints = {name: one["spec"]["podMetricsEndpoints"][0] for name, one in found.items()}
    assert [endpoints[f"moonpool-{role}"]["interval"] for role in ("conductor", "worker")] == ["5s", "30s"]
    assert endpoints["moonpool-conductor"]["metricRelabelings"] == [drop]
    labels = found["moonpool-conductor"]["metadata"]["labels"]
    assert (labels["team"], labels["release"]) == ("a", "p")
    assert "team" not in found["moonpool-worker"]["metadata"]["labels"]


def test_frontends_are_scraped_by_https_and_with_a_key(render: Any) -> None:
    key = {"serviceMonitor": {"authorization": {"existingSecret": "scrape"}}}
    release = pod_monitors(render, frontend={"tls": {"existingSecret": "web"}}, monitoring=key)
    (endpoint,) = release.one("PodMonitor", "moonpool-frontend")["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["scheme"]) == ("http", "https")
    assert endpoint["authorization"] == {"credentials": {"name": "scrape", "key": "api-key"}}
    assert endpoint["tlsConfig"] == {"insecureSkipVerify": True}
    (plain,) = release.one("PodMonitor", "moonpool-worker")["spec"]["podMetricsEndpoints"]
    assert not {"scheme", "authorization", "tlsConfig"} & plain.keys()


def test_both_ways_of_scraping_at_once_are_refused(render: Any) -> None:
    with pytest.raises(Exception, match=r"monitoring\.serviceMonitor\.enabled and monitoring\.podMonitors\.enabled"):
        pod_monitors(render, monitoring={"serviceMonitor": {"enabled": True}})
