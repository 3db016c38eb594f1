"""Module search path of the processes that Moonpool starts: this process's own code, never the working directory.

`python -m` puts the working directory first on the module search path, and an empty entry of PYTHONPATH adds it, too. A
file `worker.py` or `json.py` there would then replace the module of that name.
"""

import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parents[1]  # folder of the package `moonpool`


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module with this interpreter, without the working directory on its path."""
    return (sys.executable, "-P", "-m", module, *arguments)


def child_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return `base` for processes that run this process's code, wherever they are started.

    The code's folder comes first on PYTHONPATH if it is a source tree, not an installation. Empty entries, which stand
    for the working directory, are removed, and relative ones become absolute.
    """
    paths = list(dict.fromkeys([*_own_paths(), *_given_paths(base)]))
    kept = {name: value for name, value in base.items() if name != "PYTHONPATH"}
    return kept | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {}) | {"PYTHONSAFEPATH": "1"}


def leave_working_directory() -> None:
    """Remove the working directory from this process's path, and from that of every process that it starts.

    It stays if it holds the code that runs, or if PYTHONPATH names it. Call it before other imports.
    """
    asked_for = {*_own_paths(), *_given_paths(os.environ)}
    unwanted = {"", _working_directory()} - asked_for
    if not sys.flags.safe_path:
        sys.path[:] = [entry for entry in sys.path if entry not in unwanted]
    os.environ |= child_environment(os.environ)


def _own_paths() -> list[str]:
    """Return the folders of a source tree; [] if the code is installed."""
    installed = {Path(folder).resolve() for folder in (*site.getsitepackages(), site.getusersitepackages())}
    if _ROOT in installed:
        return []
    return [str(folder) for folder in (_ROOT, _ROOT / "proto") if folder.is_dir()]


def _given_paths(environ: Mapping[str, str]) -> list[str]:
    return [os.path.abspath(entry) for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""
