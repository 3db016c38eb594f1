"""The distribution moonpool-client: built, installed beside its own dependencies only, and used without torch."""

import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "deploy" / "client"
PACKAGES = {"loadtest", "traces"}
BUILD_DEADLINE_S = 240


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client's wheel, freshly built."""
    out = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(CLIENT)],
        capture_output=True,
        text=True,
        timeout=BUILD_DEADLINE_S,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a new environment that contains the wheel, its declared dependencies and theirs, and nothing else.

    The dependencies are links to those of the present environment, so that the test needs no network.
    """
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)],
        check=True,
        timeout=BUILD_DEADLINE_S,
    )
    wanted = tomllib.loads((CLIENT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    for name in closure(wanted):
        for path in top_level(name):
            link = site / path.name
            if not link.is_symlink():
                link.symlink_to(path)
    return python


def closure(requirements: list[str]) -> set[str]:
    """Names of the distributions that these requirements need, directly or not, without optional ones."""
    found: set[str] = set()
    waiting = list(requirements)
    while waiting:
        requirement = Requirement(waiting.pop())
        name = requirement.name.lower().replace("_", "-")
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        assert not requirement.extras
        found.add(name)
        waiting += distribution(name).requires or []
    return found


def top_level(name: str) -> Iterator[Path]:
    """Files and folders of a distribution in site-packages."""
    installed = distribution(name)
    for first in {file.parts[0] for file in installed.files or []} - {"..", "__pycache__"}:
        yield Path(str(installed.locate_file(first)))


def run(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=cwd,
        env={"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(cwd), "COLUMNS": "120"},
    )


def test_the_wheel_holds_the_load_tests_and_has_the_version_of_the_tree(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(tracked) <= names
    assert {name.split("/")[0] for name in names} == PACKAGES
    assert not [name for name in names if "__pycache__" in name]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert wheel.name.startswith(f"moonpool_client-{version}-")


def test_it_depends_on_nothing_that_the_server_does_not_need() -> None:
    server, client = (
        set(tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"])
        for folder in (ROOT, CLIENT)
    )
    assert client < server
    assert not {Requirement(text).name for text in client} & {"torch", "numba", "ray"}


@pytest.mark.parametrize("package", ["torch", "numba", "ray", "moonpool", "engine", "grpc"])
def test_the_environment_lacks_the_server_s_packages(installed: Path, tmp_path: Path, package: str) -> None:
    shown = run(installed, "-c", f"import {package}", cwd=tmp_path)
    assert f"No module named '{package}'" in shown.stderr


@pytest.mark.parametrize("command", ["trace replay", "bench serve", "bench dialogues", "bench agents"])
def test_every_command_shows_its_help(installed: Path, tmp_path: Path, command: str) -> None:
    shown = run(installed.with_name("moonpool-client"), *command.split(), "--help", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert f"Usage: moonpool-client {command}" in shown.stdout


def test_every_module_is_imported(installed: Path, tmp_path: Path) -> None:
    modules = [
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for package in sorted(PACKAGES)
        for path in sorted((ROOT / package).rglob("*.py"))
    ]
    script = f"import importlib\nfor name in {modules!r}: importlib.import_module(name)"
    shown = run(installed, "-W", "error::ImportWarning", "-c", script, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr


def test_the_statistics_of_the_bundled_trace(installed: Path, tmp_path: Path) -> None:
    script = (
        "from traces import CONVERSATION, load_trace, reuse_statistics\n"
        "found = reuse_statistics(load_trace(CONVERSATION))\n"
        "print(found.requests, 0 < found.token_hit_rate < 1)"
    )
    shown = run(installed, "-c", script, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.split() == ["12031", "True"]


def test_a_load_test_without_a_model_folder_asks_for_one(installed: Path, tmp_path: Path) -> None:
    shown = run(installed.with_name("moonpool-client"), "trace", "replay", "conversation", cwd=tmp_path)
    assert shown.returncode == 2
    assert "--model-path" in shown.stderr
    shown = run(installed.with_name("moonpool-client"), "bench", "serve", cwd=tmp_path)
    assert shown.returncode == 2
    assert "give the folder of the served model with --tokenizer" in shown.stderr


@pytest.mark.parametrize(
    ("command", "flag"), [("trace replay conversation", "--model-path"), ("bench serve", "--tokenizer")]
)
def test_an_id_of_the_hub_names_the_package_that_is_missing(
    installed: Path, tmp_path: Path, command: str, flag: str
) -> None:
    arguments = [*command.split(), flag, "org/tiny"]
    shown = run(installed.with_name("moonpool-client"), *arguments, cwd=tmp_path)
    assert shown.returncode == 2
    assert shown.stderr.startswith(f"error: {flag}: there is no folder org/tiny; give the folder of the served model")
    assert "need moonpool in place of moonpool-client" in shown.stderr


def test_verification_names_the_package_that_is_missing(installed: Path, tmp_path: Path) -> None:
    script = (
        "from pathlib import Path\n"
        "from loadtest.server import ServerInfo\n"
        "from loadtest.verify import load_reference\n"
        "load_reference(ServerInfo('http://h', 'm'), Path('model'), device='cpu', threads=None)"
    )
    shown = run(installed, "-c", script, cwd=tmp_path)
    assert "VerificationError: cannot verify: the engine is not installed; install moonpool" in shown.stderr
