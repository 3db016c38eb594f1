"""Groups of workers with vLLM: what they are given, and which values are refused."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_worker.engine_args import OWN_ARGUMENTS, SHORT_NAMES, UNSUPPORTED_ARGUMENTS, check_arguments

GPU = "nvidia.com/gpu"
GUIDE = Path(__file__).parents[2] / "docs" / "install.md"


def values(group: dict[str, Any] | None = None, **other: Any) -> dict[str, Any]:
    """Values with one group of workers, which runs vLLM."""
    only = {"prefill": None, "decode": None, "llm": {"role": "aggregated", "engine": "vllm", **(group or {})}}
    return {"workers": only, **other}


def worker_of(release: Any) -> Any:
    return release.pod("moonpool-llm")


def vllm_words(release: Any) -> list[str]:
    """The words that the worker passes on to vLLM, as it reads them."""
    prefix = "--vllm-args="
    (text,) = [each for each in worker_of(release).container["args"] if each.startswith(prefix)]
    return check_arguments(text.removeprefix(prefix))


def refused(render: Any, given: dict[str, Any]) -> str:
    with pytest.raises(Exception) as error:
        render(given)
    assert type(error.value).__name__.startswith("Helm")
    return str(error.value)


def test_every_role_learns_the_engine_and_only_workers_have_vllms_image(render: Any) -> None:
    release = render(values(image={"repository": "r/moonpool", "vllm": {"repository": "r/vllm", "tag": "7"}}))
    assert release.settings["engine"] == "vllm"
    images = {pod.name: pod.container["image"] for pod in release.pods if pod.name != "moonpool-redis"}
    assert images.pop("moonpool-llm") == "r/vllm:7"
    assert set(images.values()) == {"r/moonpool:0.1.0"}


def test_prefill_and_decode_groups_run_vllm(render: Any) -> None:
    release = render({"workers": {"prefill": {"tensorParallelSize": 2}, "decode": {}}, "config": {"engine": "vllm"}})
    for role, size in (("prefill", 2), ("decode", 1)):
        container = release.pod(f"moonpool-{role}").container
        assert container["args"][0] == f"{role}-node"
        assert container["resources"]["limits"][GPU] == size


def test_a_group_may_have_an_image_of_its_own_which_also_downloads_the_model(render: Any) -> None:
    digest = "sha256:" + "a" * 64
    model = {"source": "huggingface", "id": "a/b"}
    release = render(values({"image": {"repository": "r/own", "digest": digest}}, model=model))
    pod = worker_of(release)
    (download,) = pod.spec["initContainers"]
    assert {pod.container["image"], download["image"]} == {f"r/own@{digest}"}
    assert download["args"] == ["download", "a/b", "--any-family"]
    (frontends,) = release.pod("moonpool-frontend").spec["initContainers"]
    assert frontends["args"] == ["download", "a/b", "--no-weights", "--any-family"]


def test_the_engine_may_be_that_of_all_groups(render: Any) -> None:
    workers = {"prefill": None, "decode": None, "llm": {"role": "aggregated"}}
    release = render({"workers": workers, "config": {"engine": "vllm"}})
    assert vllm_words(release) == ["--tensor-parallel-size=1"]
    assert worker_of(release).container["resources"]["limits"][GPU] == 1


@pytest.mark.parametrize(
    ("group", "gpus", "size", "device"),
    [
        ({}, 1, 1, "cuda"),
        ({"tensorParallelSize": 4}, 4, 4, "cuda"),
        ({"tensorParallelSize": 2, "pod": {"resources": {"limits": {GPU: 2}}}}, 2, 2, "cuda"),
        ({"tensorParallelSize": 2, "pod": {"resources": {"limits": {GPU: "2"}}}}, "2", 2, "cuda"),
        ({"tensorParallelSize": 2, "pod": {"resources": {"limits": {GPU: 0}}}}, 0, 2, "cpu"),
    ],
)
def test_a_worker_has_a_gpu_for_each_part_of_the_model(
    render: Any, group: dict[str, Any], gpus: int | str, size: int, device: str
) -> None:
    release = render(values(group))
    container = worker_of(release).container
    assert container["resources"]["limits"][GPU] == gpus
    assert container["resources"]["limits"]["memory"] == "4Gi"
    assert f"--device={device}" in container["args"]
    assert vllm_words(release) == [f"--tensor-parallel-size={size}"]
    others = [pod for pod in release.pods if pod.name != "moonpool-llm"]
    assert not [pod for pod in others if GPU in pod.container["resources"].get("limits", {})]


def test_extra_flags_come_last_and_prevail(render: Any) -> None:
    args = worker_of(render(values({"pod": {"extraArgs": ["--device=cuda:1"]}}))).container["args"]
    assert [each for each in args if each.startswith("--device")] == ["--device=cuda", "--device=cuda:1"]


@pytest.mark.parametrize(("group", "size"), [({}, "8Gi"), ({"shmSize": "32Gi"}, "32Gi")])
def test_processes_of_vllm_share_memory(render: Any, group: dict[str, Any], size: str) -> None:
    release = render(values(group))
    pod = worker_of(release)
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}} in pod.spec["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod.container["volumeMounts"]
    native = render({}).pod("moonpool-decode")
    assert "shm" not in {volume["name"] for volume in native.spec["volumes"]}


def test_loading_may_take_minutes(render: Any) -> None:
    def allowed(release: Any) -> tuple[int, int]:
        probe = worker_of(release).container["startupProbe"]
        return probe["periodSeconds"], probe["failureThreshold"]

    period, threshold = allowed(render(values()))
    assert period * threshold >= 600
    everywhere = {"vllm": {"startupProbe": {"periodSeconds": 20, "failureThreshold": 90}}}
    assert allowed(render(values(**everywhere))) == (20, 90)
    assert allowed(render(values({"startupProbe": {"failureThreshold": 300}}, **everywhere))) == (20, 300)
    assert worker_of(render(values())).container["livenessProbe"]["periodSeconds"] == 10


def test_arguments_may_be_a_list_of_words(render: Any) -> None:
    words = ["--enforce-eager", "--hf-overrides", '{"it\'s": "a b"}', "$HOME `x` \\n", "-ep"]
    assert vllm_words(render(values({"vllmArgs": words}))) == ["--tensor-parallel-size=1", *words]


def test_arguments_may_be_a_map(render: Any) -> None:
    given = {
        "gpu-memory-utilization": 0.92,
        "seed": 2000000,
        "quantization": "fp8",
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "hf-overrides": {"rope_scaling": {"factor": 4, "it's": "<x>"}},
        "cudagraph-capture-sizes": [1, 2, 4],
        "compilation-config.mode": 3,
        "revision": None,
    }
    found = vllm_words(render(values({"vllmArgs": given})))
    overrides = found.pop(next(i for i, word in enumerate(found) if word.startswith("--hf-overrides=")))
    assert json.loads(overrides.partition("=")[2]) == given["hf-overrides"]
    assert found == [
        "--tensor-parallel-size=1",
        "--compilation-config.mode=3",
        *("--cudagraph-capture-sizes", "1", "2", "4"),
        "--no-enable-prefix-caching",
        "--enforce-eager",
        "--gpu-memory-utilization=0.92",
        "--quantization=fp8",
        "--seed=2000000",
    ]


def test_simple_arguments_stay_readable(render: Any) -> None:
    args = worker_of(render(values({"vllmArgs": ["--quantization=fp8", "a b"]}))).container["args"]
    assert "--vllm-args=--tensor-parallel-size=1 --quantization=fp8 'a b'" in args
    assert shlex.split("'a b'") == ["a b"]


@pytest.mark.parametrize("name", [*OWN_ARGUMENTS, *UNSUPPORTED_ARGUMENTS])
def test_what_a_worker_refuses_the_chart_refuses_before(render: Any, name: str) -> None:
    given: tuple[Any, ...] = ({name: "x"}, {f"{name}.part": "x"}, [f"--{name.replace('-', '_')}=x"], [f"--no-{name}"])
    for arguments in given:
        said = refused(render, values({"vllmArgs": arguments}))
        assert re.search(rf"workers\.llm\.vllmArgs must not contain --(no-)?{name.replace('-', '[-_]')}", said)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--max-num-seqs=4", "must not contain --max-num-seqs: Moonpool sets it; use config.max_batch"),
        ("--kv-transfer-config={}", "must not contain --kv-transfer-config: Moonpool moves KV itself"),
        ("--tensor-parallel-size=2", "the chart sets it; use tensorParallelSize"),
        ("-tp=2", "must not contain -tp: the chart sets it; use tensorParallelSize"),
        ("-pp", "must not contain -pp: a worker has as many GPUs as tensorParallelSize"),
        *((f"-{name}", f"must not contain -{name}: a worker does not support") for name in SHORT_NAMES),
    ],
)
def test_a_refused_argument_names_its_replacement(render: Any, word: str, said: str) -> None:
    assert said in refused(render, values({"vllmArgs": [word]}))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"workers": {"llm": {"role": "aggregated", "engine": "vllm"}}},
            r"workers must have the same engine in all groups, since they serve one model, got decode has transformer, "
            r"llm has vllm, prefill has transformer: change one of them",
        ),
        (values(mode="kuberay"), r"workers\.llm: engine vllm needs mode statefulset, got kuberay: Ray gives each"),
        (values(config={"vllm_args": "--x"}), r"config\.vllm_args conflicts with workers\.llm.*workers\.llm\.vllmArgs"),
        (
            values({"tensorParallelSize": 2, "pod": {"resources": {"requests": {GPU: 4}}}}),
            r"workers\.llm\.tensorParallelSize is 2, but its pod's resources name nvidia\.com/gpu: 4: they must",
        ),
        (
            values(workerPod={"resources": {"limits": {GPU: 8}}}),
            r"workers\.llm\.tensorParallelSize is 1, but its pod's resources name nvidia\.com/gpu: 8",
        ),
        (values({"tensorParallelSize": 0}), r"'/workers/llm/tensorParallelSize': minimum: got 0, want 1"),
        (values({"vllmArgs": "--x"}), r"'/workers/llm/vllmArgs': got string, want array"),
        (values({"vllmArgs": {"--x": 1}}), r"invalid propertyName '--x'"),
        (values({"shmSize": "much"}), r"'/workers/llm/shmSize': 'much' does not match pattern"),
        (values({"image": {"tag": "1"}}), r"'/workers/llm/image': missing property 'repository'"),
        (values({"startupProbe": {"seconds": 1}}), r"'/workers/llm/startupProbe': additional properties 'seconds'"),
        (values({"engine": "sglang"}), r"'/workers/llm/engine': value must be one of 'transformer', 'paced', 'vllm'"),
        (
            {"workers": {"decode": {"tensorParallelSize": 2}}},
            r"workers\.decode\.tensorParallelSize needs the engine vllm, got transformer: set workers\.decode\.engine",
        ),
        *(
            (
                {"workers": {"decode": {name: value}}},
                rf"workers\.decode\.{name} needs the engine vllm, got transformer",
            )
            for name, value in (
                ("vllmArgs", ["--x"]),
                ("shmSize", "1Gi"),
                ("startupProbe", {"periodSeconds": 1}),
            )
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(render: Any, given: dict[str, Any], said: str) -> None:
    assert re.search(said, refused(render, given))


def test_another_engine_of_all_groups_reaches_every_role(render: Any) -> None:
    workers = {name: {"engine": "paced"} for name in ("prefill", "decode")}
    assert render({"workers": workers}).settings["engine"] == "paced"
    assert "engine" not in render({"workers": {name: {"engine": "transformer"} for name in workers}}).settings


def test_the_guides_values_render(render: Any) -> None:
    blocks = re.findall(r"```yaml\n# values.yaml\n(workers:.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (text,) = [block for block in blocks if "engine: vllm" in block]
    release = render(yaml.safe_load(text))
    assert worker_of(release).container["resources"]["requests"][GPU] == 4
    assert vllm_words(release)[1:] == ["--gpu-memory-utilization=0.92", "--kv-cache-dtype=fp8"]
