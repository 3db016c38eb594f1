"""The chart's endpoint picker: what it is told, and the objects by which a gateway finds it and the API servers."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from endpoint_picker.server import serve_endpoint_picker
from moonpool.cli import app
from moonpool.config import EndpointPickerRole, all_settings, load
from moonpool.role_configs import endpoint_picker_config

NAME = "moonpool-endpoint-picker"
ROUTE = {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["llm.example.org"]}


@pytest.fixture(scope="module")
def release(render: Any) -> Any:
    return render(
        {
            "endpointPicker": {"enabled": True, "httpRoute": ROUTE, "tls": {"existingSecret": "picker"}},
            "frontend": {"apiKeys": {"existingSecret": "keys"}},
            "model": {"source": "huggingface", "id": "org/name"},
        }
    )


def flags_of(pod: Any) -> dict[str, str]:
    return dict(argument.split("=", 1) for argument in pod.container["args"][1:])


def test_without_it_there_is_none(render: Any) -> None:
    kinds = {found["kind"] for found in render().objects}
    assert "InferencePool" not in kinds
    assert not [pod for pod in render().pods if pod.name == NAME]


def test_the_process_understands_what_it_is_told(release: Any, tmp_path: Path) -> None:
    file = tmp_path / "moonpool.yaml"
    file.write_text(release.file("moonpool-config", "moonpool.yaml"))
    flags = {name.removeprefix("--").replace("-", "_"): value for name, value in flags_of(release.pod(NAME)).items()}
    flags["endpoints"] = (flags.pop("endpoint"),)
    config = load(EndpointPickerRole, flags=flags, environ={}, config_file=file, known=all_settings())
    assert config.picker.endpoints == ("moonpool-frontend-endpoints.llm.svc:8000",)
    assert (config.listen.listen, config.health.address) == ("0.0.0.0:9002", ("0.0.0.0", 8081))
    assert config.reads_model
    picker = endpoint_picker_config(config, "picker-0")
    assert picker.admission is not None
    assert picker.admission.conductor_targets == config.conductor.conductor
    assert [model.name for model in picker.admission.models] == ["org/name"]
    assert picker.http.drain_grace_s == 120
    assert release.pod(NAME).spec["terminationGracePeriodSeconds"] > 10 + 120
    assert picker.admission.http.api_keys_file == Path("/etc/moonpool/keys/keys.yaml")


def test_its_flags_are_those_of_the_command(release: Any) -> None:
    shown = CliRunner().invoke(app, ["node", "endpoint-picker", "--help"], env={"COLUMNS": "300"}).output
    assert all(name in shown for name in flags_of(release.pod(NAME)))
    assert serve_endpoint_picker.__doc__ is not None


def test_it_resolves_the_ready_api_servers_which_the_pool_selects_too(release: Any) -> None:
    endpoints = release.one("Service", "moonpool-frontend-endpoints")["spec"]
    assert (endpoints["clusterIP"], "publishNotReadyAddresses" in endpoints) == ("None", False)
    labels = release.pod("moonpool-frontend").labels
    assert endpoints["selector"].items() <= labels.items()
    pool = release.one("InferencePool", "moonpool-frontend")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    assert pool["spec"]["selector"]["matchLabels"] == endpoints["selector"]
    ports = {port["containerPort"] for port in release.pod("moonpool-frontend").container["ports"]}
    assert [port["number"] for port in pool["spec"]["targetPorts"]] == list(ports)


def test_the_pool_refers_to_its_service_and_the_route_to_the_pool(release: Any) -> None:
    reference = release.one("InferencePool", "moonpool-frontend")["spec"]["endpointPickerRef"]
    assert reference == {"name": NAME, "port": {"number": 9002}, "failureMode": "FailOpen"}
    service = release.one("Service", reference["name"])["spec"]
    (port,) = service["ports"]
    assert (port["port"], port["targetPort"], port["appProtocol"]) == (9002, "grpc", "https")
    assert service["selector"].items() <= release.pod(NAME).labels.items()
    assert {"name": "grpc", "containerPort": 9002} in release.pod(NAME).container["ports"]
    route = release.one("HTTPRoute", NAME)["spec"]
    (rule,) = route["rules"]
    expected = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "moonpool-frontend"}
    assert rule["backendRefs"] == [expected]
    assert (route["hostnames"], rule["matches"][0]["path"]["value"]) == (["llm.example.org"], "/v1")


def test_its_files_are_mounted(release: Any) -> None:
    pod = release.pod(NAME)
    mounted = {mount["mountPath"]: mount["name"] for mount in pod.container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    for flag in ("--api-keys-file", "--picker-tls-cert", "--picker-tls-key"):
        path = Path(flags_of(pod)[flag])
        secret = volumes[mounted[str(path.parent)]]["secret"]
        assert path.name in {item["path"] for item in secret["items"]}


MODELS = {
    "huggingface": {"model": {"source": "huggingface", "id": "org/name"}},
    "pvc": {"model": {"source": "pvc", "existingClaim": "claim"}},
    "imageVolume": {"model": {"source": "imageVolume", "reference": "registry/model:1"}},
    "fleet": {
        "models": [
            {"name": "a", "source": "huggingface", "id": "org/a", "workers": {"both": {"role": "aggregated"}}},
            {"name": "b", "source": "hostPath", "hostPath": "/data/b", "workers": {"both": {"role": "aggregated"}}},
        ]
    },
}


def models_of(pod: Any) -> dict[str, Any]:
    """Return the parts of a pod by which it gets its models."""
    volumes = [one for one in pod.spec["volumes"] if one["name"].startswith(("model", "hub"))]
    mounts = [one for one in pod.container["volumeMounts"] if one["name"].startswith(("model", "hub"))]
    env = [one for one in pod.container["env"] if one["name"].startswith("HF_")]
    return {"volumes": volumes, "mounts": mounts, "env": env, "init": pod.spec.get("initContainers", [])}


@pytest.mark.parametrize("source", MODELS)
def test_it_gets_the_models_as_the_api_servers_do(render: Any, source: str) -> None:
    release = render(MODELS[source] | {"endpointPicker": {"enabled": True}})
    found = models_of(release.pod(NAME))
    assert found == models_of(release.pod("moonpool-frontend"))
    assert found["volumes"]
    assert found["mounts"]


@pytest.mark.parametrize("source", MODELS)
def test_without_admission_it_asks_no_conductor_and_needs_no_model(render: Any, source: str) -> None:
    pod = render(MODELS[source] | {"endpointPicker": {"enabled": True, "admission": False}}).pod(NAME)
    assert "--no-picker-admission" in pod.container["args"]
    assert not any(models_of(pod).values())


def test_api_servers_are_scraped_through_one_service_only(render: Any) -> None:
    values = {"monitoring": {"serviceMonitor": {"enabled": True}}, "endpointPicker": {"enabled": True}}
    release = render(values)
    (monitor,) = release.kind("ServiceMonitor")
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    matched = [one for one in release.kind("Service") if selected <= one["metadata"]["labels"].items()]
    assert [one["metadata"]["name"] for one in matched] == ["moonpool-frontend"]


def test_with_https_at_the_api_servers_it_is_refused(render: Any) -> None:
    tls = {"frontend": {"tls": {"existingSecret": "web"}}}
    with pytest.raises(Exception, match=r"endpointPicker\.enabled and frontend\.tls\.existingSecret conflict"):
        render(tls | {"endpointPicker": {"enabled": True}})
    assert render(tls).kind("Deployment")


@pytest.mark.parametrize(("name", "group"), [("endpoint", "picker"), ("frontend", "endpoints")])
def test_a_group_of_workers_cannot_have_the_name_of_its_objects(render: Any, name: str, group: str) -> None:
    model = {"name": name, "source": "huggingface", "id": "org/a", "workers": {group: {"role": "aggregated"}}}
    with pytest.raises(Exception, match=rf"models\.{name}\.workers\.{group}: this name is reserved for another role"):
        render({"models": [model]})


def test_with_network_policies_gateways_reach_it(render: Any) -> None:
    values = {"enabled": True}
    release = render({"endpointPicker": values, "networkPolicy": {"enabled": True}})
    policy = release.one("NetworkPolicy", NAME)["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= release.pod(NAME).labels.items()
    assert policy["ingress"] == [{"ports": [{"protocol": "TCP", "port": "grpc"}]}]


def test_a_route_without_a_gateway_and_an_unknown_failure_mode_are_refused(render: Any) -> None:
    with pytest.raises(Exception, match="parentRefs"):
        render({"endpointPicker": {"enabled": True, "httpRoute": {"enabled": True}}})
    with pytest.raises(Exception, match="failureMode"):
        render({"endpointPicker": {"enabled": True, "inferencePool": {"failureMode": "Maybe"}}})


def test_the_documented_pool_of_other_servers_is_one(chart: Path) -> None:
    page = (chart.parents[2] / "docs" / "gateway.md").read_text(encoding="utf-8")
    text = page.split("```yaml\n", 1)[1].split("```", 1)[0]
    pool = next(found for found in yaml.safe_load_all(text) if found["kind"] == "InferencePool")
    assert set(pool["spec"]) == {"selector", "targetPorts", "endpointPickerRef"}
