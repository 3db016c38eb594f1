"""The distribution moonpool-client: built, installed beside its own dependencies only, and used without torch."""

import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.wheel.environments import CLIENT, ROOT, run

PACKAGES = {"loadtest", "traces"}


def test_the_wheel_holds_the_load_tests_and_has_the_version_of_the_tree(client_wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(client_wheel).namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(tracked) <= names
    assert {name.split("/")[0] for name in names} == PACKAGES
    assert not [name for name in names if "__pycache__" in name]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert client_wheel.name.startswith(f"moonpool_client-{version}-")


def test_it_depends_on_nothing_that_the_server_does_not_need() -> None:
    server, client = (
        set(tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"])
        for folder in (ROOT, CLIENT)
    )
    assert client < server
    assert not {Requirement(text).name for text in client} & {"torch", "numba", "ray"}


@pytest.mark.parametrize("package", ["torch", "numba", "ray", "moonpool", "engine", "grpc"])
def test_the_environment_lacks_the_server_s_packages(client_installed: Path, tmp_path: Path, package: str) -> None:
    shown = run(client_installed, "-c", f"import {package}", cwd=tmp_path)
    assert f"No module named '{package}'" in shown.stderr


@pytest.mark.parametrize("command", ["trace replay", "trace convert", "bench serve", "bench dialogues", "bench agents"])
def test_every_command_shows_its_help(client_installed: Path, tmp_path: Path, command: str) -> None:
    shown = run(client_installed.with_name("moonpool-client"), *command.split(), "--help", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert f"Usage: moonpool-client {command}" in shown.stdout


def test_every_module_is_imported(client_installed: Path, tmp_path: Path) -> None:
    modules = [
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for package in sorted(PACKAGES)
        for path in sorted((ROOT / package).rglob("*.py"))
    ]
    script = f"import importlib\nfor name in {modules!r}: importlib.import_module(name)"
    shown = run(client_installed, "-W", "error::ImportWarning", "-c", script, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr


def test_the_statistics_of_the_bundled_trace(client_installed: Path, tmp_path: Path) -> None:
    script = (
        "from traces import CONVERSATION, load_trace, reuse_statistics\n"
        "found = reuse_statistics(load_trace(CONVERSATION))\n"
        "print(found.requests, 0 < found.token_hit_rate < 1)"
    )
    shown = run(client_installed, "-c", script, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.split() == ["12031", "True"]


def test_a_load_test_without_a_model_folder_asks_for_one(client_installed: Path, tmp_path: Path) -> None:
    shown = run(client_installed.with_name("moonpool-client"), "trace", "replay", "conversation", cwd=tmp_path)
    assert shown.returncode == 2
    assert "--model-path" in shown.stderr
    shown = run(client_installed.with_name("moonpool-client"), "bench", "serve", cwd=tmp_path)
    assert shown.returncode == 2
    assert "give the folder of the served model with --tokenizer" in shown.stderr


@pytest.mark.parametrize(
    ("command", "flag"), [("trace replay conversation", "--model-path"), ("bench serve", "--tokenizer")]
)
def test_an_id_of_the_hub_names_the_package_that_is_missing(
    client_installed: Path, tmp_path: Path, command: str, flag: str
) -> None:
    arguments = [*command.split(), flag, "org/tiny"]
    shown = run(client_installed.with_name("moonpool-client"), *arguments, cwd=tmp_path)
    assert shown.returncode == 2
    assert shown.stderr.startswith(f"error: {flag}: there is no folder org/tiny; give the folder of the served model")
    assert "need moonpool in place of moonpool-client" in shown.stderr


def test_verification_names_the_package_that_is_missing(client_installed: Path, tmp_path: Path) -> None:
    script = (
        "from pathlib import Path\n"
        "from loadtest.server import ServerInfo\n"
        "from loadtest.verify import load_reference\n"
        "load_reference(ServerInfo('http://h', 'm'), Path('model'), device='cpu', threads=None)"
    )
    shown = run(client_installed, "-c", script, cwd=tmp_path)
    assert "VerificationError: cannot verify: the engine is not installed; install moonpool" in shown.stderr
