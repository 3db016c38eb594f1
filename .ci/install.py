"""Installs the project and its development tools into a virtual environment: with uv where it works, else with pip.

    python .ci/install.py VENV [TORCH_INDEX] [--requirements FILE | --vllm | --triton]

With a file, what it names is installed in place of the project; with --vllm, the project and vLLM for CPUs; with
--triton, only Triton, which comes with torch's CUDA build and whose interpreter tests need beside the CPU build. Only
the standard library is used, and any Python from 3.11 on.

Every file that is installed must have a SHA-256 of the lock files (requirements*.lock, written by `make lock`), so that
no package source can replace another's package; nothing is built from sources but the project itself, by the locked
hatchling and without a network. Packages come from the sources of pip's configuration, which uv does not read: they are
handed over. torch's CPU build (requirements-cpu.lock) comes from TORCH_INDEX alone, such as
https://download.pytorch.org/whl/cpu, or from pip's find-links. Without both, the package index's build is installed, on
Linux with its CUDA libraries (requirements-cuda.lock).
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = (ROOT / "requirements.lock", ROOT / "requirements-dev.lock")
CPU_LOCK = ROOT / "requirements-cpu.lock"
CUDA_LOCK = ROOT / "requirements-cuda.lock"
VLLM_LOCK = ROOT / "requirements-vllm.lock"
OLDEST_PYTHON = (3, 11)
_PIP_SOURCE_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")
_NETWORK = ("cert", "client-cert", "proxy", "trusted-host")
LOCKED = ["--no-deps", "--require-hashes", "--only-binary=:all:"]


def main(venv: Path, torch_index: str, requirements: Path | None, what: str) -> int:
    if sys.version_info < OLDEST_PYTHON:
        print(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make setup PYTHON=python3.12")
        return 2
    python = venv / "bin" / "python"
    if not python.exists():
        run([sys.executable, "-m", "venv", str(venv)])
    with tempfile.TemporaryDirectory() as folder:
        for installer in (UvInstaller(python), PipInstaller(python)):
            steps = Steps(installer, torch_index)
            if not installer.prepare(Path(folder)):
                continue
            if steps.named(requirements) if requirements else getattr(steps, what)():
                return 0
            print(f"{installer.name} could not install it", flush=True)
    print("neither uv nor pip could install it; the messages above say why")
    print(
        "A mismatch of hashes means that a package source has another file than the one that was locked: find out why."
    )
    print("For a new version, or a platform whose build of torch is not locked yet: make lock (docs/contributing.md).")
    return 1


class PipInstaller:
    """Installs by the environment's pip, from the sources of its configuration."""

    name = "pip"

    def __init__(self, python: Path) -> None:
        self.python = python

    def prepare(self, folder: Path) -> bool:
        """Return True if the installer can be used."""
        return True

    def install(self, *arguments: str, source: Sequence[str] = ()) -> bool:
        """Run one installation; `source` replaces the configured package sources."""
        environment, network = {}, []
        if source:  # pip adds its configured sources to those of the command line, and nothing removes them there
            environment = {"PIP_CONFIG_FILE": os.devnull} | dict.fromkeys(_PIP_SOURCE_VARIABLES, "")
            network = [f"--{key}={value}" for key, found in pip_settings(self.python, _NETWORK) for value in found]
        return run([str(self.python), "-m", "pip", "install", *network, *source, *arguments], **environment)


class UvInstaller:
    """Installs by the locked uv."""

    name = "uv"

    def __init__(self, python: Path) -> None:
        self.python = python
        self._configured = pip_sources(python)

    def prepare(self, folder: Path) -> bool:
        """Install uv itself; return False if that fails."""
        entry = folder / "uv.txt"
        entry.write_text(locked_entry("uv"), encoding="utf-8")
        return run([str(self.python), "-m", "pip", "install", "-q", *LOCKED, "-r", str(entry)])

    def install(self, *arguments: str, source: Sequence[str] = ()) -> bool:
        """Run one installation; `source` replaces the configured package sources."""
        options = source or [f"--{key}={value}" for key, values in self._configured.items() for value in values]
        # Of several sources of pip's configuration the first need not have the locked version; hashes decide.
        strategy = ["--no-config", "--index-strategy=unsafe-best-match"]
        uv = [str(self.python.with_name("uv")), "pip", "install", "--python", str(self.python)]
        return run([*uv, *strategy, *options, *arguments])


class Steps:
    """The installations, in order; a step runs only if those before it succeeded."""

    def __init__(self, installer: PipInstaller | UvInstaller, torch_index: str) -> None:
        self._installer = installer
        self._torch_index = torch_index

    def project(self) -> bool:
        """Install the locked packages, then the project."""
        source = self._cpu_source()
        torch = CPU_LOCK if source else CUDA_LOCK
        if not self._installer.install(*LOCKED, "-r", str(torch), source=source):
            return False
        if not self._installer.install(*LOCKED, *(word for lock in LOCKS for word in ("-r", str(lock)))):
            return False
        return self._itself()

    def vllm(self) -> bool:
        """Install torch's CPU build, which vLLM's has, the locked packages with vLLM, then the project."""
        if not (source := self._cpu_source()):
            print("vLLM for CPUs needs torch's CPU build: TORCH_INDEX=https://download.pytorch.org/whl/cpu")
            return False
        if not self._installer.install(*LOCKED, "-r", str(CPU_LOCK), source=source):
            return False
        return self._installer.install(*LOCKED, "-r", str(VLLM_LOCK)) and self._itself()

    def triton(self) -> bool:
        """Install the Triton of torch's CUDA build."""
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as entry:
            entry.write(locked_entry("triton", (CUDA_LOCK,)))
            entry.flush()
            return self._installer.install(*LOCKED, "-r", entry.name)

    def _itself(self) -> bool:
        alone = ["--no-deps", "--no-build-isolation", "--no-index"]
        return self._installer.install(*alone, "-e", str(ROOT))

    def named(self, requirements: Path) -> bool:
        """Install what a file names, whose versions are pinned there."""
        pinned = re.search(r"^torch==\S+", requirements.read_text(encoding="utf-8"), re.M)
        if pinned and self._torch_index:
            source = [f"--index-url={self._torch_index}"]
            if not self._installer.install("--no-deps", f"{pinned[0]}+cpu", source=source):
                return False
        return self._installer.install("-r", str(requirements))

    def _cpu_source(self) -> list[str]:
        """Return options for the only source of torch's CPU build; none if there is no such source."""
        if self._torch_index:
            return [f"--index-url={self._torch_index}"]
        links = pip_sources(self._installer.python)["find-links"]
        return ["--no-index", *(f"--find-links={link}" for link in links)] if has_cpu_torch(links) else []


def locked_entry(name: str, locks: Sequence[Path] = LOCKS) -> str:
    """Return a package's entry of the lock files: its pinned version and the hashes of its files."""
    for lock in locks:
        found = re.search(rf"^{re.escape(name)}==(?:.*\\\n)*.*\n", lock.read_text(encoding="utf-8"), re.M)
        if found:
            return found[0]
    raise SystemExit(f"{name} is not in {' or '.join(lock.name for lock in locks)}: run `make lock`")


def has_cpu_torch(links: Sequence[str]) -> bool:
    """Return True if a folder of pip's find-links has the locked CPU build of torch."""
    found = re.search(r"^torch==([^\s;]+)", CPU_LOCK.read_text(encoding="utf-8"), re.M)
    assert found is not None
    folders = [Path(link.removeprefix("file://")) for link in links]
    return any(True for folder in folders if folder.is_dir() for _ in folder.glob(f"torch-{found[1]}-*.whl"))


def pip_sources(python: Path) -> dict[str, list[str]]:
    """Return where pip looks for packages, by option."""
    return dict(pip_settings(python, ("index-url", "extra-index-url", "find-links")))


def pip_settings(python: Path, names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return options of pip's configuration and their values: of its files and its variables, which win as in pip."""
    shown = subprocess.run(
        [str(python), "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, list[str]] = {name: [] for name in names}
    for section in ("global", "install", ":env:"):
        for line in shown.splitlines():
            name, _, value = line.partition("=")
            key = name.removeprefix(f"{section}.")
            if name.startswith(f"{section}.") and key in found:
                found[key] = str(ast.literal_eval(value)).split()
    return list(found.items())


def run(command: list[str], **environment: str) -> bool:
    """Run a command and return True if it succeeded; variables with the value "" are removed."""
    print("+", *command, flush=True)
    variables = {**os.environ, "VIRTUAL_ENV": "", **environment}
    variables = {name: value for name, value in variables.items() if value or name not in environment}
    return subprocess.run(command, check=False, cwd=ROOT, env=variables).returncode == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", type=Path)
    parser.add_argument("torch_index", nargs="?", default="")
    parser.add_argument("--requirements", type=Path, metavar="FILE")
    kinds = parser.add_mutually_exclusive_group()
    for kind in ("vllm", "triton"):
        kinds.add_argument(f"--{kind}", dest="what", action="store_const", const=kind, default="project")
    given = parser.parse_args()
    requirements = given.requirements and given.requirements.absolute()
    sys.exit(main(given.venv.absolute(), given.torch_index, requirements, given.what))
