"""Virtual environments of the tools, one each because their dependencies conflict.

All versions are pinned in `requirements/{tool}.txt`. An environment is created once, and again when its file changes.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.clients.errors import ToolMissing

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).parent / "requirements"
INSTALL_S = 1800.0


@dataclass(frozen=True)
class Environment:
    """Environment of a tool; `folder` need not exist yet."""

    tool: str
    folder: Path

    @property
    def requirements(self) -> Path:
        return REQUIREMENTS / f"{self.tool}.txt"

    def command(self) -> str:
        """Return the path of the tool's command. Raises ToolMissing if the installation contains none."""
        path = self.folder / "bin" / self.tool
        if not path.is_file():
            raise ToolMissing(f"{self.requirements.name} was installed, but there is no {path}")
        return str(path)

    def version(self) -> str:
        """Return the pinned version of the tool."""
        for line in self.requirements.read_text(encoding="utf-8").splitlines():
            name, _, version = line.partition("==")
            if name == self.tool:
                return version
        raise ToolMissing(f"{self.requirements} does not pin {self.tool}")

    def install(self, torch_index: str = "") -> None:
        """Install the requirements unless they are installed already. Raises ToolMissing."""
        stamp, wanted = self.folder / ".requirements", fingerprint(self.requirements)
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        log = self.folder.parent / f"{self.tool}.install.log"
        installer = [sys.executable, str(ROOT / ".ci" / "install.py"), str(self.folder)]
        options = [*([torch_index] if torch_index else []), "--requirements", str(self.requirements)]
        with log.open("wb") as output:
            try:
                status = subprocess.run(
                    [*installer, *options], stdout=output, stderr=subprocess.STDOUT, timeout=INSTALL_S, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                raise ToolMissing(f"installing {self.tool} took more than {INSTALL_S:g} s; see {log}") from None
        if status:
            raise ToolMissing(f"{self.tool} could not be installed (exit code {status}); see {log}")
        stamp.write_text(wanted, encoding="utf-8")


def fingerprint(path: Path) -> str:
    """Return a key that changes with the file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def offline(folder: Path) -> dict[str, str]:
    """Return environment variables that make Hugging Face's libraries use only the cache in `folder`."""
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
    return {**kept, **quiet, **threads, "HF_HOME": str(folder)}
