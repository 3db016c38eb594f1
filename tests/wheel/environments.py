"""Wheels built from this tree, and new environments in which they are installed."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "deploy" / "client"
BUILD_DEADLINE_S = 240


def build(project: Path, out: Path) -> Path:
    """Build the wheel of a project into a folder."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(project)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_DEADLINE_S, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


def environment_with(wheel: Path, home: Path) -> tuple[Path, Path]:
    """Create an environment with a wheel and none of its dependencies; return its Python and its site-packages."""
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)],
        check=True,
        timeout=BUILD_DEADLINE_S,
    )
    return python, site


def see_all_packages(site: Path) -> None:
    """Let an environment see the present one's packages, but not the project's source tree.

    The present site-packages are added as a directory through a .pth file. Their own .pth files, among them the
    editable install's, are not followed from there.
    """
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")


def link_client_dependencies(site: Path) -> None:
    """Link what the client needs, and nothing else, from the present environment, so that no network is needed."""
    wanted = tomllib.loads((CLIENT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    for name in closure(wanted):
        for path in top_level(name):
            link = site / path.name
            if not link.is_symlink():
                link.symlink_to(path)


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
    """Run a program of an environment with nothing else in sight."""
    return subprocess.run(
        [str(python), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
        env=bare_variables(python, cwd),
    )


def bare_variables(python: Path, home: Path) -> dict[str, str]:
    """Variables of a user with this home folder who uses this environment."""
    return {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(home), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
