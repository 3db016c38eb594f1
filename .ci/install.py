"""Installs the project and its development tools into a virtual environment: with uv where it works, else with pip.

    python .ci/install.py VENV [TORCH_INDEX] [--requirements FILE]

With a file, what it names is installed in place of the project. Only the standard library is used, and any Python from
3.11 on. Versions are those of constraints.txt, or of the file. uv does not read pip's configuration, so its package
sources are handed over; torch's CPU build may come from pip's find-links, or from TORCH_INDEX, e.g.
https://download.pytorch.org/whl/cpu, and is whatever the package index has otherwise.
"""

import argparse
import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ["-c", str(ROOT / "constraints.txt"), "-e", f"{ROOT}[dev]"]
OLDEST_PYTHON = (3, 11)


def main(venv: Path, torch_index: str, wanted: list[str]) -> int:
    if sys.version_info < OLDEST_PYTHON:
        print(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make setup PYTHON=python3.12")
        return 2
    python = venv / "bin" / "python"
    if not python.exists():
        run([sys.executable, "-m", "venv", str(venv)])
    sources = {key: values for key, values in pip_sources(python).items() if values}
    if torch_index:
        sources.setdefault("extra-index-url", []).append(torch_index)
    if not (install_with_uv(python, sources, wanted) or install_with_pip(python, sources, wanted)):
        print("neither uv nor pip could install it; the messages above say why")
        return 1
    return 0


def install_with_uv(python: Path, sources: dict[str, list[str]], wanted: list[str]) -> bool:
    if not run([str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), "uv"]):
        print("uv cannot be installed; going on with pip")
        return False
    uv = [str(python.with_name("uv")), "pip", "install", "--python", str(python)]
    options = [f"--{key}={value}" for key, values in sources.items() for value in values]
    # pip takes the best version over all its sources, uv by default only those of the first that has the package.
    strategy = ["--index-strategy=unsafe-best-match"]
    if run([*uv, *strategy, *options, *wanted]):
        return True
    print("uv could not install it; going on with pip")
    return False


def install_with_pip(python: Path, sources: dict[str, list[str]], wanted: list[str]) -> bool:
    extra = [f"--extra-index-url={url}" for url in sources.get("extra-index-url", [])]
    return run([str(python), "-m", "pip", "install", *extra, *wanted])


def pip_sources(python: Path) -> dict[str, list[str]]:
    """Where pip looks for packages, from its files and its variables; the variables win, as they do in pip."""
    shown = subprocess.run(
        [str(python), "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    sources: dict[str, list[str]] = {"index-url": [], "extra-index-url": [], "find-links": []}
    for section in ("global", "install", ":env:"):
        for line in shown.splitlines():
            name, _, value = line.partition("=")
            key = name.removeprefix(f"{section}.")
            if name.startswith(f"{section}.") and key in sources:
                sources[key] = str(ast.literal_eval(value)).split()
    return sources


def run(command: list[str]) -> bool:
    print("+", *command, flush=True)
    return subprocess.run(command, check=False, cwd=ROOT, env={**os.environ, "VIRTUAL_ENV": ""}).returncode == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", type=Path)
    parser.add_argument("torch_index", nargs="?", default="")
    parser.add_argument("--requirements", type=Path, metavar="FILE")
    given = parser.parse_args()
    pinned = ["-r", str(given.requirements.absolute())] if given.requirements else PROJECT
    sys.exit(main(given.venv.absolute(), given.torch_index, pinned))
