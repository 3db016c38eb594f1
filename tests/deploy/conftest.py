"""The chart as Helm itself renders it, and what is rendered as the objects it is."""

import hashlib
import importlib.metadata
import io
import os
import re
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from moonpool.config import ServeConfig
from moonpool.options import configured_command
from moonpool.role_process.roles import ROLES
from tests.ci_modules import ci_module

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "moonpool"
# Of Helm's library in helm-python-sdk 0.2.2: a compiled program of somebody else's, so no other is loaded.
HELM_LIBRARY = "9108c3a68d6ed3a394d02543bb4afeeb9f9e2bbcf9fbc228f48ac5576e3bdf83"
# The commit with the chart from which upgrades are tested: before it took volumes, init containers and further objects.
PREVIOUS = "5517d2d1515f88c47b5e91a30425eda55402ba5a"
EXAMPLES = sorted(path.stem.removeprefix("values-") for path in (CHART / "examples").glob("values-*.yaml"))
_POD = {"POD_NAME": "moonpool-pod-0", "POD_IP": "10.1.2.3", "NODE_NAME": "host-7.example.com"}
_COMPOSITES = {role.command: role.composite for role in ROLES} | {"serve": ServeConfig}
_WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet")


def _check_library() -> None:
    """Before anything can load it."""
    (library,) = [
        path.locate() for path in importlib.metadata.files("helm-python-sdk") or () if path.name == "libhelm_c.so"
    ]
    found = hashlib.sha256(Path(str(library)).read_bytes()).hexdigest()
    if found != HELM_LIBRARY:
        raise ImportError(f"{library} has the SHA-256 {found}, expected {HELM_LIBRARY}: what is that?")


_check_library()


@dataclass(frozen=True)
class Pod:
    """A pod template, and the object that holds it."""

    name: str  # the object's; for Ray's, with the group's
    template: dict[str, Any]

    @property
    def spec(self) -> dict[str, Any]:
        return dict(self.template["spec"])

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template["metadata"]["labels"])

    @property
    def container(self) -> dict[str, Any]:
        """Its one container."""
        (container,) = self.spec["containers"]
        return dict(container)


@dataclass(frozen=True)
class Release:
    """All objects of one rendered release."""

    objects: tuple[dict[str, Any], ...]
    notes: str

    def kind(self, kind: str) -> list[dict[str, Any]]:
        return [found for found in self.objects if found["kind"] == kind]

    def one(self, kind: str, name: str) -> dict[str, Any]:
        (found,) = [found for found in self.kind(kind) if found["metadata"]["name"] == name]
        return found

    @property
    def pods(self) -> list[Pod]:
        found = [
            Pod(one["metadata"]["name"], one["spec"]["template"]) for kind in _WORKLOADS for one in self.kind(kind)
        ]
        found += [
            Pod(one["metadata"]["name"], one["spec"]["leaderWorkerTemplate"]["workerTemplate"])
            for one in self.kind("LeaderWorkerSet")
        ]
        for ray in self.kind("RayCluster"):
            groups = [ray["spec"]["headGroupSpec"] | {"groupName": "head"}, *ray["spec"]["workerGroupSpecs"]]
            found += [Pod(f"{ray['metadata']['name']}-{group['groupName']}", group["template"]) for group in groups]
        return found

    def pod(self, name: str) -> Pod:
        (found,) = [pod for pod in self.pods if pod.name == name]
        return found

    def file(self, config_map: str, name: str) -> str:
        return str(self.one("ConfigMap", config_map)["data"][name])

    @property
    def settings(self) -> dict[str, Any]:
        """Return the content of moonpool.yaml."""
        return dict(yaml.safe_load(self.file("moonpool-config", "moonpool.yaml")))


class Told:
    """The settings of a container's process, as its own parser reads arguments, file and variables."""

    def __init__(self, release: Release, folder: Path) -> None:
        self._release = release
        self._folder = folder
        for config_map in release.kind("ConfigMap"):
            for name, text in config_map["data"].items():
                place = folder / ("slo" if name == "slo.yaml" else "") / name
                place.parent.mkdir(exist_ok=True)
                place.write_text(text.replace("/etc/moonpool/", f"{folder}/"))

    def settings(self, pod: Pod) -> Any:
        arguments = [self._expanded(argument) for argument in pod.container["args"]]
        if "command" in pod.container:  # a shell that ends as `moonpool serve "$@"`
            assert arguments[0].rstrip().endswith('exec moonpool serve "$@"')
            arguments = ["serve", *arguments[2:]]
        seen: list[Any] = []
        app = typer.Typer()
        app.callback()(lambda: None)
        command = arguments[0]
        argument = "model" if command == "serve" else None

        def run(config: Any) -> int:
            seen.append(config)
            return 0

        configured_command(app, command, _COMPOSITES[command], run, help="", argument=argument)
        result = CliRunner().invoke(app, arguments, env=self._environment(pod))
        assert result.exit_code == 0, result.output
        return seen[0]

    def _environment(self, pod: Pod) -> dict[str, str | None]:
        """Return the environment of the process; a secret's value is a placeholder."""
        found: dict[str, str | None] = {name: None for name in os.environ if name.startswith("MOONPOOL_")}
        for one in pod.container["env"]:
            found[one["name"]] = one.get("value", _POD.get(one["name"], "a-secret"))
        mounts = {mount["mountPath"]: mount for mount in pod.container["volumeMounts"]}
        return found | {"MOONPOOL_CONFIG": str(self._folder / mounts[found["MOONPOOL_CONFIG"]]["subPath"])}

    def _expanded(self, argument: str) -> str:
        """As Kubernetes expands it."""
        return re.sub(r"\$\((\w+)\)", lambda found: _POD[found[1]], argument)


@pytest.fixture
def told(tmp_path: Path) -> Callable[[Release], Told]:
    return lambda release: Told(release, tmp_path)


Render = Callable[..., Release]


@pytest.fixture(scope="session")
def generator() -> ModuleType:
    """.ci/generate_chart.py."""
    return ci_module("generate_chart")


@pytest.fixture(scope="session")
def render(generator: ModuleType) -> Render:
    """(values, release's name and so on) as a Release."""

    def rendered(values: dict[str, Any] | None = None, **release: Any) -> Release:
        files = generator.render(values or {}, **release)
        notes = files.pop("NOTES.txt")
        documents = (found for text in files.values() for found in yaml.load_all(text, yaml.CSafeLoader))
        return Release(tuple(found for found in documents if found is not None), notes)

    return rendered


@pytest.fixture(scope="session")
def example_values() -> Callable[[str], dict[str, Any]]:
    def load(name: str) -> dict[str, Any]:
        return dict(yaml.safe_load((CHART / "examples" / f"values-{name}.yaml").read_text(encoding="utf-8")))

    return load


@pytest.fixture(scope="session", params=EXAMPLES)
def example_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def example(example_name: str, render: Render, example_values: Callable[[str], dict[str, Any]]) -> Release:
    """Each example of the chart, rendered."""
    return render(example_values(example_name))


@pytest.fixture(scope="session")
def chart() -> Path:
    return CHART


@pytest.fixture(scope="session")
def previous_chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart of an earlier commit; tests are skipped in a copy of the sources without that commit."""
    path = CHART.relative_to(ROOT)
    archived = subprocess.run(["git", "archive", PREVIOUS, str(path)], cwd=ROOT, capture_output=True, check=False)
    if archived.returncode:
        pytest.skip(f"git has no commit {PREVIOUS}, which needs the whole history: {archived.stderr.decode().strip()}")
    folder = tmp_path_factory.mktemp("previous")
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / path
