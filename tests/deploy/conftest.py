"""The chart as Helm itself renders it, and what is rendered as the objects it is."""

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "moonpool"
# Of Helm's library in helm-python-sdk 0.2.2: a compiled program of somebody else's, so no other is loaded.
HELM_LIBRARY = "9108c3a68d6ed3a394d02543bb4afeeb9f9e2bbcf9fbc228f48ac5576e3bdf83"
EXAMPLES = sorted(path.stem.removeprefix("values-") for path in (CHART / "examples").glob("values-*.yaml"))
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


Render = Callable[..., Release]


@pytest.fixture(scope="session")
def generator() -> ModuleType:
    """.ci/generate_chart.py."""
    spec = importlib.util.spec_from_file_location("generate_chart", ROOT / ".ci" / "generate_chart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
def example(request: pytest.FixtureRequest, render: Render, example_values: Callable[[str], dict[str, Any]]) -> Release:
    """Each example of the chart, rendered."""
    return render(example_values(request.param))


@pytest.fixture(scope="session")
def chart() -> Path:
    return CHART
