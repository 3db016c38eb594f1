"""Installation: only locked files are accepted, whatever a package source offers, and the locks are up to date."""

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.ci_modules import CI, ci_module

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def install() -> ModuleType:
    return ci_module("install")


@pytest.fixture
def lock(tmp_path: Path) -> ModuleType:
    """lock.py, whose files are copies."""
    found = ci_module("lock")
    for name in ("CONSTRAINTS", "BUILD_LOCK", "CPU_LOCK", "CUDA_LOCK"):
        setattr(found, name, Path(shutil.copy(getattr(found, name), tmp_path)))
    found.LOCKS = tuple(Path(shutil.copy(path, tmp_path)) for path in found.LOCKS)
    return found


def make_wheel(folder: Path, version: str, content: str) -> str:
    """Write a wheel of the package `lockedthing`; return its SHA-256."""
    about = f"lockedthing-{version}.dist-info"
    files = {
        "lockedthing.py": content,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: lockedthing\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {
        name: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        for name, text in files.items()
    }
    files[f"{about}/RECORD"] = "".join(f"{name},sha256={digest},\n" for name, digest in digests.items())
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"lockedthing-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def make_index(folder: Path, version: str, content: str, *, tells_hash: bool = True) -> str:
    """Write a package index of that wheel; return its URL."""
    package = folder / "lockedthing"
    digest = make_wheel(package, version, content)
    name = f"lockedthing-{version}-py3-none-any.whl"
    told = f"#sha256={digest}" if tells_hash else ""
    (package / "index.html").write_text(f'<!DOCTYPE html><html><body><a href="{name}{told}">{name}</a></body></html>')
    return folder.as_uri()


class Machine:
    """An environment whose pip is configured for several package indexes."""

    def __init__(self, install: ModuleType, installer: str, folder: Path) -> None:
        self.target = folder / "installed"
        self._requirements = folder / "lock.txt"
        python = Path(sys.executable)
        self._installer = (install.UvInstaller if installer == "uv" else install.PipInstaller)(python)
        self._options = install.LOCKED

    def takes(self, digest: str, *, source: Sequence[str] = ()) -> str | None:
        """Install version 1.0 with that hash; return the module's content, None if the installation was refused."""
        self._requirements.write_text(f"lockedthing==1.0 \\\n    --hash=sha256:{digest}\n")
        shutil.rmtree(self.target, ignore_errors=True)
        arguments = [*self._options, "--target", str(self.target), "-r", str(self._requirements)]
        if not self._installer.install(*arguments, source=source):
            return None
        return (self.target / "lockedthing.py").read_text()


@pytest.fixture(params=["pip", "uv"])
def machine(request: Any, install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("UV_NO_CACHE", "1")
    good = make_index(tmp_path / "good", "1.0", "good")
    shadow = make_index(tmp_path / "shadow", "1.0", "replaced", tells_hash=False)
    monkeypatch.setenv("PIP_INDEX_URL", good)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", shadow)
    return Machine(install, request.param, tmp_path)


def digest_of(machine: Machine, index: str) -> str:
    (wheel,) = (machine.target.parent / index / "lockedthing").glob("*.whl")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_a_file_is_installed_only_with_its_locked_hash(machine: Machine) -> None:
    good, shadow = (machine.target.parent / name for name in ("good", "shadow"))
    only_good, only_shadow = [f"--index-url={good.as_uri()}"], [f"--index-url={shadow.as_uri()}"]
    digest = digest_of(machine, "good")
    assert machine.takes(digest, source=only_good) == "good"
    tampered = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    assert machine.takes(tampered, source=only_good) is None
    assert machine.takes(digest, source=only_shadow) is None


def test_an_index_cannot_replace_another_ones_package(machine: Machine) -> None:
    assert machine.takes(digest_of(machine, "good")) in (
        "good",
        None,
    )  # None: the other one came first, and was refused


def test_a_given_source_is_the_only_one(machine: Machine) -> None:
    """torch's index: that the configured ones have the package, too, does not matter."""
    digest = digest_of(machine, "good")
    empty = machine.target.parent / "empty"
    empty.mkdir()
    assert machine.takes(digest, source=[f"--index-url={empty.as_uri()}"]) is None


def test_every_step_but_the_projects_own_is_hashed_and_none_adds_an_index(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Recorder:
        python = Path(sys.executable)

        def __init__(self) -> None:
            self.steps: list[tuple[list[str], list[str]]] = []

        def install(self, *arguments: str, source: Sequence[str] = ()) -> bool:
            self.steps.append((list(arguments), list(source)))
            return True

    monkeypatch.setattr(install, "pip_sources", lambda python: {"find-links": []})
    for index in ("", "https://torch.example/cpu"):
        recorder = Recorder()
        assert install.Steps(recorder, index).project()
        (torch, source), *others, (project, _) = recorder.steps
        assert source == ([f"--index-url={index}"] if index else [])
        assert torch[-1] == str(install.CPU_LOCK if index else install.CUDA_LOCK)
        assert all("--require-hashes" in words for words in (torch, *(words for words, _ in others)))
        assert not [source for _, source in others if source]
        assert {"--no-deps", "--no-build-isolation", "--no-index"} <= set(project)


def test_triton_is_installed_from_its_locked_entry_alone(install: ModuleType) -> None:
    class Recorder:
        def install(self, *arguments: str, source: Sequence[str] = ()) -> bool:
            names = re.findall(r"^[a-z]\S+(?===)", Path(arguments[-1]).read_text(encoding="utf-8"), re.M)
            return names == ["triton"] and list(arguments[:-2]) == install.LOCKED

    assert install.Steps(Recorder(), "").triton()


def test_nothing_that_installs_adds_an_index_beside_another() -> None:
    files = [*CI.glob("*.py"), CI / "run", ROOT / "Makefile", *(ROOT / "deploy" / "containers").iterdir()]
    found = [path for path in files if "--extra-index-url" in path.read_text(encoding="utf-8")]
    assert found == []
    script = (ROOT / "deploy" / "containers" / "install.sh").read_text(encoding="utf-8")
    assert "--require-hashes" in script


def test_the_locks_are_those_of_the_constraints_and_of_the_project() -> None:
    done = subprocess.run(
        [sys.executable, str(CI / "lock.py"), "check"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("constraints.txt", "numpy==", "numpy==9", "numpy is 9"),
        ("constraints.txt", "aiohttp==", "another==1.0\naiohttp==", "another is in constraints.txt and in no lock"),
        ("requirements.lock", "numpy==", "numpi==", "numpi is missing in constraints.txt"),
        ("requirements-dev.lock", "pytest==", "pytest==8", "pytest is"),
        ("requirements-dev.lock", "uv==", "uw==", "pyproject.toml needs uv, which is not in any lock"),
        ("requirements.lock", "    --hash=", "    --hashes=", "has no hash"),
        ("requirements-cpu.lock", "+cpu", "", "torch is 2"),
        ("requirements-cuda.lock", "triton==", "requests==", "must not be in requirements-cuda.lock"),
        ("requirements-build.lock", "hatchling==", "--extra-index-url=x\nhatchling==", "lines that are no entries"),
    ],
)
def test_a_lock_that_differs_is_found(
    lock: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, old: str, new: str, said: str
) -> None:
    if said == "has no hash":
        path = tmp_path / file
        entry = next(entry for _, entry in lock.entries(path.read_text()).values())
        replaced(path, entry, entry.split(" \\\n")[0] + "\n")
    else:
        replaced(tmp_path / file, old, new)
    assert lock.check() == 1
    assert said in capsys.readouterr().out
