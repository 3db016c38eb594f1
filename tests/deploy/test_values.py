"""Wrong values are refused with words that name the place; what is made from elsewhere is up to date."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import helm_python
import pytest
import yaml

from moonpool.config import ServeConfig, all_settings, load

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"mode": "compose"}, "'/mode': value must be one of 'statefulset', 'kuberay'"),
        ({"frontend": {"replica": 3}}, "'/frontend': additional properties 'replica' not allowed"),
        ({"frontend": {"replicas": "3"}}, "'/frontend/replicas': got string, want integer"),
        ({"frontend": {"drainSeconds": -1}}, "'/frontend/drainSeconds': minimum: got -1, want 0"),
        ({"frontend": {"ingress": {"enabled": True}}}, "'/frontend/ingress/hosts': minItems: got 0, want 1"),
        ({"frontend": {"pod": {"extraArgs": "--x"}}}, "'/frontend/pod/extraArgs': got string, want array"),
        ({"frontend": {"pod": {"nodeSelector": {"a": True}}}}, "'/frontend/pod/nodeSelector/a': got boolean"),
        ({"conductor": {"replicas": 0}}, "'/conductor/replicas': minimum: got 0, want 1"),
        ({"workers": {"Prefill!": {"role": "prefill"}}}, "invalid propertyName 'Prefill!'"),
        ({"workers": {"conductor": {"role": "prefill"}}}, "workers.conductor: this name is reserved for another role"),
        ({"workers": {"x": {"role": "both"}}}, "'/workers/x/role': value must be one of 'prefill', 'decode'"),
        ({"workers": {"prefill": None}}, "workers must have a group with role prefill and one with role decode"),
        ({"config": {"blocktokens": 8}}, "'/config': additional properties 'blocktokens' not allowed"),
        ({"config": {"api_key": ["x"]}}, "'/config': additional properties 'api_key' not allowed"),
        ({"config": {"block_tokens": 0}}, "'/config/block_tokens': minimum: got 0, want 1"),
        ({"config": {"transport": "pigeon"}}, "'/config/transport': value must be one of 'auto', 'rdma', 'tcp', 'shm'"),
        ({"image": {"digest": "latest"}}, "'/image/digest': 'latest' does not match pattern"),
        ({"pool": {"bytes": 64}}, "'/pool/bytes': got number, want string"),
        ({"pool": {"bytes": "64 elephants"}}, "'/pool/bytes': '64 elephants' does not match pattern"),
        ({"externalRedis": {"url": "redis://:secret@h"}}, "'/externalRedis/url': "),
        ({"externalRedis": {"url": "redis://h"}}, "externalRedis.url and redis.enabled conflict"),
        ({"redis": {"enabled": False}, "externalRedis": {"existingSecret": "s"}}, "needs externalRedis.url"),
        (
            {"rdma": {"enabled": True, "hostNetwork": True}},
            "rdma.hostNetwork needs tls.enabled: no NetworkPolicy applies",
        ),
        (
            {"rdma": {"enabled": True, "hostNetwork": True}, "joinToken": {"existingSecret": "join"}},
            "rdma.hostNetwork needs tls.enabled",
        ),
        (
            {"rdma": {"enabled": True, "hostNetwork": True}, "tls": {"enabled": True, "existingSecret": "s"}},
            "rdma.hostNetwork needs networkPolicy.nodeCIDRs",
        ),
        (
            {
                "mode": "kuberay",
                "rdma": {"enabled": True, "hostNetwork": True},
                "tls": {"enabled": True, "existingSecret": "s"},
                "networkPolicy": {"enabled": False},
            },
            "rdma.hostNetwork with mode kuberay needs ray.existingTokenSecret",
        ),
        ({"networkPolicy": {"nodeCIDRs": ["10.0.0.0"]}}, "'/networkPolicy/nodeCIDRs/0': '10.0.0.0' does not match"),
        ({"networkPolicy": {"nodeCIDRs": ["0.0.0.0/0"]}}, "'/networkPolicy/nodeCIDRs/0': '0.0.0.0/0' does not match"),
        ({"networkPolicy": {"nodeCIDRs": ["::/0"]}}, "'/networkPolicy/nodeCIDRs/0': '::/0' does not match"),
        ({"tls": {"enabled": True}}, "tls.enabled needs certificates: set tls.existingSecret"),
        ({"tls": {"enabled": True, "certManager": {"enabled": True}}}, "issuerRef.name must not be empty"),
        (
            {"config": {"undivided": "act", "colocated_prefill": "act"}},
            "config.undivided and config.colocated_prefill are two names of one setting",
        ),
        ({"model": {"source": "pvc"}}, "model.source pvc needs model.existingClaim"),
        ({"model": {"source": "huggingface"}}, "model.source huggingface needs model.id"),
        ({"model": {"source": "huggingface", "id": "Qwen3-8B"}}, "'/model/id': 'Qwen3-8B' does not match pattern"),
        (
            {"model": {"cache": {"existingClaim": "a", "hostPath": "/b"}}},
            "existingClaim and model.cache.hostPath conflict",
        ),
        ({"model": {"source": "hostPath", "hostPath": "models"}}, "'/model/hostPath': 'models' does not match pattern"),
        ({"runAsUser": 0}, "'/runAsUser': minimum: got 0, want 1"),
        ({"nonsense": {}}, "additional properties 'nonsense' not allowed"),
    ],
)
def test_wrong_values_are_refused_by_their_place(render: Any, values: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception) as error:
        render(values)
    assert type(error.value).__name__.startswith("Helm")
    assert said in str(error.value)


@pytest.mark.parametrize(
    "text", ['"; rm -rf /"', "$(POD_IP)", "{{ .Release.Name }}", "a: b\nc: d", "'", "#", "x" * 5000, "ünïcödé"]
)
def test_a_text_stays_the_text_that_it_is(render: Any, text: str) -> None:
    release = render(
        {
            "model": {"servedNames": [text]},
            "frontend": {"pod": {"extraArgs": [text], "annotations": {"a": text}}},
            "workerPod": {"extraEnv": [{"name": "X", "value": text}]},
        }
    )
    assert release.settings["served_model_name"] == [text]
    front = release.pod("moonpool-frontend")
    assert front.container["args"][-1] == text
    assert front.template["metadata"]["annotations"]["a"] == text
    assert {"name": "X", "value": text} in release.pod("moonpool-decode").container["env"]


def test_a_group_takes_the_place_of_another(render: Any) -> None:
    release = render({"workers": {"prefill": None, "decode": None, "both": {"role": "aggregated", "replicas": 2}}})
    workers = [pod for pod in release.pods if "moonpool/kind" in pod.labels]
    assert [pod.name for pod in workers] == ["moonpool-both"]
    assert workers[0].labels["llm-d.ai/role"] == "both"


def test_a_group_says_otherwise_for_itself_alone(render: Any) -> None:
    own = {"resources": {"limits": {"memory": "9Gi"}}, "nodeSelector": {"gpu": "big"}}
    release = render({"workers": {"decode": {"pod": own}}, "workerPod": {"nodeSelector": {"zone": "a"}}})
    decode, prefill = release.pod("moonpool-decode"), release.pod("moonpool-prefill")
    assert decode.container["resources"]["limits"]["memory"] == "9Gi"
    assert decode.spec["nodeSelector"] == {"gpu": "big", "zone": "a"}
    assert prefill.spec["nodeSelector"] == {"zone": "a"}
    assert prefill.container["resources"]["limits"]["memory"] == "4Gi"


@pytest.mark.parametrize(
    ("values", "warning"),
    [
        ({}, "The bundled model is tiny and for trials only"),
        ({}, "The API requires no key"),
        ({}, "neither encrypted nor authenticated"),
        ({}, "The bundled Redis is a single instance"),
        ({"tls": {"enabled": True, "existingSecret": "s"}, "rdma": {"enabled": True}}, "RDMA cannot be encrypted"),
        ({"slo": {"record": {"headers": "any"}}, "redis": {"enabled": False}}, "only in the conductors' pods"),
    ],
)
def test_what_is_not_for_production_is_said(render: Any, values: dict[str, Any], warning: str) -> None:
    assert warning in render(values).notes
    fit = {
        "model": {"source": "image"},
        "frontend": {"apiKeys": {"existingSecret": "keys"}},
        "tls": {"enabled": True, "existingSecret": "tls"},
        "redis": {"enabled": False},
        "externalRedis": {"url": "redis://h"},
    }
    assert "!" not in render(fit).notes


@pytest.mark.parametrize("mode", ["statefulset", "kuberay"])
def test_join_tokens_reach_every_role(render: Any, mode: str) -> None:
    release = render({"mode": mode, "joinToken": {"existingSecret": "mine"}, "redis": {"enabled": False}})
    assert len(release.pods) >= 5
    for pod in release.pods:
        (volume,) = [one for one in pod.spec["volumes"] if one["name"] == "join"]
        assert volume["secret"]["secretName"] == "mine"
        assert {"name": "join", "mountPath": "/etc/moonpool/join", "readOnly": True} in pod.container["volumeMounts"]
    assert (
        "join_token_file: /etc/moonpool/join/tokens"
        in release.one("ConfigMap", "moonpool-config")["data"]["moonpool.yaml"]
    )


@pytest.mark.parametrize(("told", "made"), [({}, 1), ({"replicas": 0}, 0), ({"replicas": 3}, 3)])
def test_a_group_has_one_worker_unless_it_says_otherwise(render: Any, told: dict[str, int], made: int) -> None:
    values = {"workers": {"more": {"role": "decode", **told}}}
    assert render(values).one("StatefulSet", "moonpool-more")["spec"]["replicas"] == made
    (ray,) = render({"mode": "kuberay", **values}).kind("RayCluster")
    (group,) = [one for one in ray["spec"]["workerGroupSpecs"] if one["groupName"] == "more"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (made, made, made)


def test_a_group_that_follows_the_demand_is_scaled_by_what_the_conductor_wants(render: Any) -> None:
    group = {"role": "decode", "autoscaling": {"enabled": True, "minReplicas": 1, "maxReplicas": 5}}
    release = render({"workers": {"decode": group}, "model": {"servedNames": ["large", "alias"]}})
    (scaler,) = release.kind("HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"]["name"] == "moonpool-decode"
    (metric,) = scaler["spec"]["metrics"]
    assert metric["external"]["metric"] == {
        "name": "moonpool_desired_nodes",
        "selector": {"matchLabels": {"model_name": "large", "role": "decode"}},
    }
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    assert scaler["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 0
    assert "replicas" not in release.one("StatefulSet", "moonpool-decode")["spec"]
    own = {**group["autoscaling"], "metrics": [{"type": "Resource"}]}  # type: ignore[dict-item]
    (scaler,) = render({"workers": {"decode": {**group, "autoscaling": own}}}).kind("HorizontalPodAutoscaler")
    assert scaler["spec"]["metrics"] == [{"type": "Resource"}]


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("rediss://me@redis.example:6390/2", "rediss://redis.example:6390"),
        ("redis://redis.example", "redis://redis.example:6379"),
    ],
)
def test_rays_head_keeps_its_state_in_the_conductors_redis(render: Any, url: str, address: str) -> None:
    external = {"url": url, "existingSecret": "secret", "passwordKey": "word"}
    values = {"mode": "kuberay", "redis": {"enabled": False}, "externalRedis": external}
    (ray,) = render(values).kind("RayCluster")
    options = ray["spec"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == address
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"] == {"name": "secret", "key": "word"}
    assert options.get("redisUsername") == ({"value": "me"} if "@" in url else None)
    release = render({"mode": "kuberay"})
    assert release.kind("RayCluster")[0]["spec"]["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis://moonpool-redis.llm.svc:6379"
    }
    (policy,) = [one for one in release.kind("NetworkPolicy") if one["metadata"]["name"] == "moonpool-redis"]
    callers = [peer["podSelector"]["matchLabels"] for peer in policy["spec"]["ingress"][0]["from"]]
    assert [labels["app.kubernetes.io/component"] for labels in callers] == ["conductor", "ray-head"]


def test_without_a_redis_rays_head_keeps_its_state_to_itself(render: Any) -> None:
    release = render({"mode": "kuberay", "redis": {"enabled": False}})
    assert "gcsFaultToleranceOptions" not in release.kind("RayCluster")[0]["spec"]


def test_what_the_installation_guide_names_is_there(chart: Path) -> None:
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    values = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))
    named = set(re.findall(r"`([a-z]\w*(?:\.[a-zA-Z]+)*)`", text)) | set(re.findall(r"`([\w.]+): ", text))
    paths = [path for path in named - {"tls.crt", "tls.key"} if path.partition(".")[0] in values]
    assert len(paths) >= 15
    for path in paths:
        inside = values
        for name in path.split("."):
            assert name in inside, path
            inside = inside[name]
    files = set(re.findall(r"deploy/[\w./-]+", text))
    files |= {f"deploy/helm/moonpool/{path}" for path in re.findall(r"`(examples/[\w.-]+)`", text)}
    assert len(files) >= 4
    assert [path for path in files if not (ROOT / path.rstrip("/.")).exists()] == []


def test_values_that_the_installation_guide_shows_are_accepted(render: Any) -> None:
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    shown = re.findall(r"```yaml\n# values.yaml\n(.*?)```", text, flags=re.DOTALL)
    assert len(shown) >= 2
    for values in shown:
        assert render(yaml.safe_load(values)).kind("Deployment")


def test_an_earlier_name_of_a_setting_is_passed_on(render: Any) -> None:
    for name in ("undivided", "colocated_prefill"):
        assert render({"config": {name: "act"}}).settings[name] == "act"


def test_everything_that_the_schema_lets_through_a_role_takes(generator: ModuleType) -> None:
    for name, declared in generator.settable().items():
        default = () if declared.default in (None, ()) else (declared.default,)
        for value in (*declared.key.choices, *default):
            load(ServeConfig, flags={name: str(value)}, environ={}, config_file=None, known=all_settings())


def test_the_schema_tells_of_every_value_and_of_no_other(chart: Path) -> None:
    """Values and schema are two lists of the same names."""
    schema = yaml.safe_load((chart / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))

    def names(part: Any, inside: Any, path: str) -> set[str]:
        part = schema["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        if "properties" not in part or path == "/config":
            return set()
        assert isinstance(inside, dict), path
        missing = {f"{path}/{name}" for name in part["properties"].keys() - inside.keys()}
        missing |= {f"{path}/{name} (schema)" for name in inside.keys() - part["properties"].keys()}
        return missing.union(*(names(part["properties"][name], inside[name], f"{path}/{name}") for name in inside))

    assert names(schema, values, "") == {"/global", "/tls/certManager/issuerRef/group"}


def test_schema_table_and_golden_renders_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / ".ci" / "generate_chart.py"), "check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_versions_are_those_of_what_the_image_holds(chart: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    about = yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8"))
    assert about["appVersion"] == project["version"]
    values = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))
    assert f"ray=={values['ray']['version']}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def test_helm_finds_nothing_to_complain_of(chart: Path) -> None:
    assert helm_python.lint(chart, strict=True)


def test_the_chart_is_small_and_brings_no_resource_definitions(chart: Path, render: Any, tmp_path: Path) -> None:
    with helm_python.Chart.load(chart) as loaded:
        assert loaded.crds == []
        assert loaded.dependencies == []
        packed = Path(loaded.save(tmp_path))
    # Helm keeps a release, chart included, in a Secret of at most 1 MiB.
    assert packed.stat().st_size < 200_000
    assert not render({"mode": "kuberay"}).kind("CustomResourceDefinition")


HUB: dict[str, Any] = {"source": "huggingface", "id": "Qwen/Qwen3-8B", "revision": "v1"}


def init_container(pod: Any, name: str) -> dict[str, Any]:
    """The init container of a pod."""
    found: dict[str, Any] = next(each for each in pod.spec["initContainers"] if each["name"] == name)
    return found


def test_a_model_of_the_hub_is_downloaded_before_a_pod_starts_and_used_without_network(render: Any) -> None:
    release = render({"model": {**HUB, "token": {"existingSecret": "hub"}, "cache": {"existingClaim": "models"}}})
    assert release.settings["model"] == "Qwen/Qwen3-8B@v1"
    for name, weights in (("moonpool-prefill", True), ("moonpool-decode", True), ("moonpool-frontend", False)):
        pod = release.pod(name)
        download = init_container(pod, "model")
        assert download["args"] == ["download", "Qwen/Qwen3-8B@v1", *([] if weights else ["--no-weights"])]
        token = next(each for each in download["env"] if each["name"] == "HF_TOKEN")
        assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
        assert {"name": "model", "mountPath": "/models/hub"} in download["volumeMounts"]
        own = pod.container
        assert {"name": "HF_HUB_OFFLINE", "value": "1"} in own["env"]
        assert not any(each["name"] == "HF_TOKEN" for each in own["env"])
        assert {"name": "model", "mountPath": "/models/hub", "readOnly": True} in own["volumeMounts"]
        assert {"name": "model", "persistentVolumeClaim": {"claimName": "models"}} in pod.spec["volumes"]
    assert not any(each["name"] == "model" for each in release.pod("moonpool-pool").spec["volumes"])


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        ({}, {"emptyDir": {}}),
        ({"sizeLimit": "20Gi"}, {"emptyDir": {"sizeLimit": "20Gi"}}),
        ({"hostPath": "/models"}, {"hostPath": {"path": "/models", "type": "Directory"}}),
    ],
)
def test_downloaded_models_are_kept_where_the_cache_says(
    render: Any, cache: dict[str, Any], volume: dict[str, Any]
) -> None:
    for mode, name in (("statefulset", "moonpool-decode"), ("kuberay", "moonpool-launcher")):
        pod = render({"mode": mode, "model": {**HUB, "cache": cache}}).pod(name)
        assert {"name": "model", **volume} in pod.spec["volumes"]
        assert init_container(pod, "model")["args"] == ["download", "Qwen/Qwen3-8B@v1"]
