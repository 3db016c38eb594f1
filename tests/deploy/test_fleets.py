"""Releases with several models: names, selectors, settings, sources, and what Helm refuses."""

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from moonpool.config import TopologySettings, WorkerRole, composite_settings
from moonpool.config.models import model_settings
from settings.keys import group_settings
from settings.worker import EngineSettings

GPU = "nvidia.com/gpu"
ROOT = Path(__file__).parents[2]
ONE_MODEL = ("1p1d", "8p8d-rdma", "cpu-trial", "kuberay", "vllm")  # examples that came before `models`
Told = Callable[[Any], Any]  # the settings of a release's processes, as they read them


def model(name: str, **own: Any) -> dict[str, Any]:
    """One of `models`, with an aggregated group."""
    return {"name": name, "source": "image", "workers": {"both": {"role": "aggregated"}}, **own}


def pair(**own: Any) -> dict[str, Any]:
    """A prefill and a decode group with equal values."""
    return {role: {"role": role, **own} for role in ("prefill", "decode")}


@pytest.fixture(scope="module")
def fleet(render: Any, example_values: Callable[[str], dict[str, Any]]) -> Any:
    return render(example_values("fleet"))


def workers(release: Any) -> list[Any]:
    return [pod for pod in release.pods if pod.labels.get("moonpool/kind") == "worker"]


def workloads(release: Any) -> dict[str, dict[str, Any]]:
    """The objects that run workers, by the component of their pods."""
    found = (*release.kind("StatefulSet"), *release.kind("LeaderWorkerSet"))
    by_component = {one["metadata"]["labels"]["app.kubernetes.io/component"]: one for one in found}
    del by_component["conductor"]
    return by_component


def documents(text: str) -> Iterator[dict[str, Any]]:
    return (one for one in yaml.load_all(text, yaml.CSafeLoader) if one is not None)


def refused(render: Any, values: dict[str, Any]) -> str:
    with pytest.raises(Exception) as error:
        render(values)
    assert type(error.value).__name__.startswith("Helm")
    return str(error.value)


@pytest.mark.parametrize("name", ONE_MODEL)
def test_values_with_one_model_give_the_manifests_of_before(
    render: Any, generator: ModuleType, example_values: Callable[[str], dict[str, Any]], name: str
) -> None:
    values = example_values(name)
    unseen = {"prometheusRule": {"enabled": False}, "dashboards": {"enabled": False}}
    release = render(values | {"monitoring": values.get("monitoring", {}) | unseen})
    golden = list(documents((generator.GOLDEN / f"{name}.yaml").read_text(encoding="utf-8")))
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in release.objects}
    assert by_name == {(one["kind"], one["metadata"]["name"]): one for one in golden}
    assert len(golden) == len(release.objects)
    assert release.one("ConfigMap", "moonpool-config")["data"].keys() == {"moonpool.yaml"}
    assert not [pod for pod in release.pods if "moonpool/model" in pod.labels]


def test_every_group_serves_its_model_under_its_names_at_the_same_conductors(fleet: Any, told: Told) -> None:
    reader = told(fleet)
    frontend = reader.settings(fleet.pod("moonpool-frontend"))
    served = {entry.name: entry for entry in frontend.served}
    assert list(served) == ["large", "medium", "small"]
    assert served["large"].aliases == ("Qwen/Qwen3-32B",)
    found: dict[str, set[str]] = {}
    for pod in workers(fleet):
        settings = reader.settings(pod)
        entry = served[pod.labels["moonpool/model"]]
        assert (settings.model.name, settings.model.aliases) == (entry.name, entry.aliases)
        assert settings.model.path == entry.path
        assert settings.conductor.conductor == frontend.conductor.conductor
        assert settings.engine.engine == ("vllm" if entry.name == "large" else "transformer")
        found.setdefault(entry.name, set()).add(pod.container["args"][0])
    two = {"prefill-node", "decode-node"}
    assert found == {"large": two, "medium": two, "small": {"aggregated-node"}}


def test_settings_of_a_group_precede_those_of_its_model_and_of_the_cluster(render: Any, told: Told) -> None:
    groups = {"p": {"role": "prefill", "config": {"max_batch": 3}}, "d": {"role": "decode"}}
    config = {"max_batch": 2, "capacity_tokens": 16_000_000, "ttft_slo": 1.5, "reasoning_parser": "off"}
    models = [model("one", workers=groups, config=config), model("two")]
    release = render({"models": models, "config": {"max_batch": 1, "threads": 7}})
    reader = told(release)
    engines = {pod.name: reader.settings(pod).engine for pod in workers(release)}
    assert {name: engine.max_batch for name, engine in engines.items()} == {
        "moonpool-one-p": 3,
        "moonpool-one-d": 2,
        "moonpool-two-both": 1,
    }
    assert {engine.threads for engine in engines.values()} == {7}
    assert engines["moonpool-one-d"].capacity_tokens == 16_000_000
    one, two = reader.settings(release.pod("moonpool-frontend")).served
    assert (one.objectives.ttft_s, two.objectives.ttft_s) == (1.5, None)
    assert one.parsers == ("off", None)


def test_a_group_of_the_only_model_may_have_settings_and_an_image_of_its_own(render: Any, told: Told) -> None:
    own = {"config": {"max_batch": 5}, "image": {"repository": "r/own", "tag": "3"}}
    release = render({"workers": {"decode": own}})
    reader = told(release)
    decode, prefill = release.pod("moonpool-decode"), release.pod("moonpool-prefill")
    assert reader.settings(decode).engine.max_batch == 5
    assert reader.settings(prefill).engine.max_batch != 5
    assert (decode.container["image"], prefill.container["image"]) == ("r/own:3", "moonpool:0.1.0")
    assert reader.settings(decode).model.name == reader.settings(prefill).model.name == "moonpool"


def test_names_are_unique_and_do_not_depend_on_other_models(
    render: Any, example_values: Callable[[str], dict[str, Any]], fleet: Any
) -> None:
    names = [(one["kind"], one["metadata"]["name"]) for one in fleet.objects]
    assert len(names) == len(set(names))
    values = example_values("fleet")
    values["models"] = [model("added"), *reversed(copy.deepcopy(values["models"]))]
    values["models"][2]["workers"]["spare"] = {"role": "decode"}
    other = render(values)
    assert other.pod("moonpool-pool").template == fleet.pod("moonpool-pool").template
    later, before = workloads(other), workloads(fleet)
    assert later.keys() - before.keys() == {"added-both", "medium-spare"}
    assert {name: later[name] for name in before} == before


def test_groups_select_their_own_pods_and_services_and_policies_all(fleet: Any) -> None:
    pods = workers(fleet)
    assert len(pods) == len(workloads(fleet)) == 6

    def selected(selector: dict[str, str]) -> set[str]:
        return {pod.name for pod in pods if selector.items() <= pod.labels.items()}

    for workload in fleet.kind("StatefulSet"):
        if workload["metadata"]["name"] != "moonpool-conductor":
            assert selected(workload["spec"]["selector"]["matchLabels"]) == {workload["metadata"]["name"]}
    budgets = [one for one in fleet.kind("PodDisruptionBudget") if one["metadata"]["name"] in {p.name for p in pods}]
    assert len(budgets) == len(pods)
    for budget in budgets:
        assert selected(budget["spec"]["selector"]["matchLabels"]) == {budget["metadata"]["name"]}
    service = fleet.one("Service", "moonpool-worker")["spec"]["selector"]
    policy = fleet.one("NetworkPolicy", "moonpool")["spec"]["podSelector"]
    metrics = fleet.one("NetworkPolicy", "moonpool-metrics")["spec"]["podSelector"]
    assert selected(service) == selected(policy["matchLabels"]) == selected(metrics["matchLabels"])
    assert selected(service) == {pod.name for pod in pods}
    assert policy["matchExpressions"] == [
        {"key": "app.kubernetes.io/component", "operator": "NotIn", "values": ["redis"]}
    ]
    for pod in pods:
        (spread,) = pod.spec["topologySpreadConstraints"]
        assert selected(spread["labelSelector"]["matchLabels"]) == {pod.name}


def changed(one: Any, other: Any) -> set[str]:
    return {a.name for a, b in zip(one.pods, other.pods, strict=True) if a.template != b.template}


@pytest.mark.parametrize(
    ("config", "restarted"),
    [
        ({"max_batch": 9}, {"moonpool-one-prefill", "moonpool-one-decode"}),
        ({"ttft_slo": 9}, {"moonpool-frontend", "moonpool-conductor"}),
    ],
)
def test_a_models_settings_restart_only_those_that_read_them(
    render: Any, config: dict[str, Any], restarted: set[str]
) -> None:
    before, after = (
        render({"models": [model("one", workers=pair(), config=own), model("two")]}) for own in ({}, config)
    )
    assert changed(before, after) == restarted


def test_the_keys_of_a_models_settings_are_those_of_the_configuration_file(generator: ModuleType, chart: Path) -> None:
    own = model_settings().keys() - group_settings(TopologySettings).keys()
    assert generator.model_config_schema()["properties"].keys() == own - {"vllm_args", "worker_drain_grace"}
    text = (chart / "templates" / "_models.tpl").read_text(encoding="utf-8")
    (shared,) = re.findall(r'"moonpool\.sharedKeys" -}}\n\{\{- list (.+?) \| toJson', text)
    assert set(re.findall(r'"(\w+)"', shared)) == own - group_settings(EngineSettings).keys()
    of_groups = generator.group_config_schema()["properties"].keys()
    assert of_groups <= composite_settings(WorkerRole).keys()
    assert not of_groups & {"engine", "vllm_args", "block_tokens", "pool_bytes", "model"}


def mounted(pod: Any) -> dict[str, str]:
    """Where the pod's own container finds volumes with models."""
    kinds = {volume["name"]: volume for volume in pod.spec["volumes"]}
    names = {name for name in kinds if name.startswith("model") or name == "hub"}
    return {mount["mountPath"]: mount["name"] for mount in pod.container["volumeMounts"] if mount["name"] in names}


def test_frontends_have_every_model_and_workers_their_own(fleet: Any) -> None:
    frontend = fleet.pod("moonpool-frontend")
    assert mounted(frontend) == {"/models/hub": "hub", "/models/medium": "model-medium"}
    downloads = {each["name"]: each["args"] for each in frontend.spec["initContainers"]}
    assert downloads == {
        "model-large": ["download", "Qwen/Qwen3-32B", "--no-weights", "--any-family"],
        "model-small": ["download", "Qwen/Qwen3-0.6B", "--no-weights"],
    }
    large, medium = fleet.pod("moonpool-large-decode"), fleet.pod("moonpool-medium-decode")
    assert mounted(large) == {"/models/hub": "hub"}
    (download,) = large.spec["initContainers"]
    assert download["args"] == ["download", "Qwen/Qwen3-32B", "--any-family"]
    assert mounted(medium) == {"/models/medium": "model-medium"}
    assert "initContainers" not in medium.spec
    assert not mounted(fleet.pod("moonpool-conductor")) | mounted(fleet.pod("moonpool-pool"))


def test_groups_have_hardware_images_and_variables_of_their_own(fleet: Any) -> None:
    def gpus(name: str) -> int | None:
        found: int | None = fleet.pod(name).container["resources"]["limits"].get(GPU)
        return found

    names = ("moonpool-large-decode", "moonpool-medium-decode", "moonpool-small-both")
    assert [gpus(name) for name in names] == [4, 1, None]
    images = [fleet.pod(name).container["image"].rpartition("/")[2] for name in names]
    assert images == ["moonpool-vllm:0.1.0", "moonpool-cuda:0.1.0", "moonpool:0.1.0"]
    small = fleet.pod("moonpool-small-both")
    assert {"name": "MALLOC_ARENA_MAX", "value": "2"} in small.container["env"]
    assert small.spec["nodeSelector"] == {"example.com/pool": "cpu"}
    assert "tolerations" not in small.spec


def test_the_notes_name_the_models(fleet: Any) -> None:
    assert "Models: large, Qwen/Qwen3-32B; medium; small." in fleet.notes
    assert "bundled model" not in fleet.notes


def test_pods_of_a_leader_worker_set_are_whole_workers(fleet: Any) -> None:
    one = fleet.one("LeaderWorkerSet", "moonpool-large-prefill")
    template = one["spec"]["leaderWorkerTemplate"]
    assert (template["size"], template["restartPolicy"]) == (2, "None")
    topology = "leaderworkerset.sigs.k8s.io/exclusive-topology"
    assert one["metadata"]["annotations"] == {topology: "topology.kubernetes.io/rack"}
    args = fleet.pod("moonpool-large-prefill").container["args"]
    assert args[:2] == ["prefill-node", "--node-id=$(POD_NAME)"]
    assert "leaderTemplate" not in template


def test_a_leader_worker_set_of_fixed_size_may_restart_as_one(render: Any) -> None:
    group = {"replicas": 3, "leaderWorkerSet": {"size": 4, "restartPolicy": "RecreateGroupOnPodRestart"}}
    release = render({"workers": {"prefill": group}})
    one = release.one("LeaderWorkerSet", "moonpool-prefill")
    assert one["spec"]["replicas"] == 3
    assert one["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert "annotations" not in one["metadata"]
    plain = render({}).pod("moonpool-prefill")
    assert release.pod("moonpool-prefill").template == plain.template


def test_names_have_room_for_what_kubernetes_adds(render: Any) -> None:
    group = {"both": {"role": "aggregated", "leaderWorkerSet": {"size": 64}}}
    shared = {"pool": {"sharedMemory": {"enabled": True}}}
    release = render({"models": [model("m" * 20, workers=group)], **shared}, name="r" * 20)
    name = release.kind("LeaderWorkerSet")[0]["metadata"]["name"]
    assert len(name) == 46
    assert len(f"{name}-99-0123456789") <= 63  # the label with the hash of a revision
    assert len(f"/run/moonpool/{name}-99-63") <= 107 - 1 - 40
    said = refused(render, {"fullnameOverride": "r" * 21, "models": [model("m" * 20)]})
    assert f"the name {'r' * 21}-{'m' * 20}-both has 47 characters, at most 46 are possible" in said


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"models": [model("Large")]}, r"'/models/0/name': 'Large' does not match pattern"),
        ({"models": [{"name": "a", "source": "image"}]}, r"'/models/0': missing property 'workers'"),
        ({"models": [model("a", source="bundled")]}, r"'/models/0/source': value must be one of 'image', 'pvc'"),
        ({"models": [model("a", cache={})]}, r"'/models/0': additional properties 'cache' not allowed"),
        ({"models": [model("a", config={"prefill_nodes": 1})]}, r"additional properties 'prefill_nodes' not allowed"),
        ({"models": [model("a", config={"max_batch": 0})]}, r"'/models/0/config/max_batch': minimum: got 0, want 1"),
        ({"workers": {"decode": {"config": {"pool_policy": "lru"}}}}, r"additional properties 'pool_policy' not allow"),
        ({"models": [model("a"), model("a")]}, r"models: the name a is given twice; names of models must differ"),
        ({"models": [model("hub")]}, r"models\.hub: this name is reserved for the folder of downloaded models"),
        (
            {"models": [model("a"), model("b", servedNames=["b", "a"])]},
            r"models: the name a in requests is given twice, to a and to b: change servedNames",
        ),
        (
            {"models": [model("a", path="/m"), model("b", path="/m")]},
            r"models: a and b have the same path, /m: each needs its own folder",
        ),
        (
            {"models": [model("a", source="pvc")]},
            r"models\.a\.source pvc needs models\.a\.existingClaim, which is empty",
        ),
        (
            {"models": [model("a", workers={"p": {"role": "prefill"}})]},
            r"models\.a\.workers must have a group with role prefill and one with role decode, or one with role agg",
        ),
        (
            {
                "models": [
                    model("a", workers={"x": {"role": "aggregated"}, "y": {"role": "aggregated", "engine": "vllm"}})
                ]
            },
            r"models\.a\.workers must have the same engine in all groups, since they serve one model, got x has transf",
        ),
        (
            {
                "models": [
                    model("a", workers={"b-c": {"role": "aggregated"}}),
                    model("a-b", workers={"c": {"role": "aggregated"}}),
                ]
            },
            r"models\.a\.workers\.b-c and models\.a-b\.workers\.c have the same name, moonpool-a-b-c: rename a model",
        ),
        (
            {"models": [model("ray", workers={"head": {"role": "aggregated"}})]},
            r"models\.ray\.workers\.head: this name is",
        ),
        ({"models": [model("a")], "model": {"source": "image"}}, r"model and models conflict: with models, only"),
        ({"models": [model("a")], "model": {"servedNames": ["x"]}}, r"model and models conflict"),
        (
            {"models": [model("a")], "workers": {"decode": {"replicas": 2}}},
            r"workers and models conflict: each model has its own groups; move those of workers below the workers of",
        ),
        (
            {"models": [model("a")], "mode": "kuberay"},
            r"models needs mode statefulset, got kuberay: Ray places workers",
        ),
        *(
            (
                {"mode": "kuberay", "workers": {"decode": {name: value}}},
                rf"workers\.decode\.{name} needs mode statefulset, got kuberay: Ray starts the workers of all groups",
            )
            for name, value in (
                ("config", {"max_batch": 1}),
                ("image", {"repository": "x"}),
                ("leaderWorkerSet", {"size": 2}),
            )
        ),
        (
            {"workers": {"decode": {"leaderWorkerSet": {}}}},
            r"'/workers/decode/leaderWorkerSet': missing property 'size'",
        ),
        (
            {"workers": {"decode": {"leaderWorkerSet": {"size": 2, "restartPolicy": "Default"}}}},
            r"restartPolicy': value must be one of 'None', 'RecreateGroupOnPodRestart'",
        ),
        (
            {
                "config": {"engine": "vllm"},
                "workers": {
                    "decode": {
                        "tensorParallelSize": 16,
                        "leaderWorkerSet": {"size": 2},
                        "pod": {"resources": {"limits": {GPU: 8}}},
                    }
                },
            },
            r"workers\.decode\.tensorParallelSize is 16, but its pod's resources name nvidia\.com/gpu: 8: they must be "
            r"equal: each pod of a LeaderWorkerSet is a whole worker, since vLLM's processes and the KV slots",
        ),
        (
            {"config": {"engine": "vllm"}, "workers": {"decode": {"vllmArgs": {"nnodes": 2}}}},
            r"workers\.decode\.vllmArgs must not contain --nnodes: a worker does not support one model over",
        ),
    ],
)
def test_models_and_groups_that_cannot_be_are_refused(render: Any, values: dict[str, Any], said: str) -> None:
    assert re.search(said, refused(render, values))


def test_the_guides_fleet_renders(render: Any) -> None:
    guide = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n# values.yaml\n(models:.*?)```", guide, re.DOTALL)
    release = render(yaml.safe_load(text))
    assert {pod.labels["moonpool/model"] for pod in workers(release)} == {"large", "small"}
