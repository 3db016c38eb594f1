"""Part of the image's build: add Moonpool to the environment of vLLM's image, whose own packages stay as they are.

    add_to_vllm.py LOCK WHEEL

Runs in a virtual environment that sees the image's packages, installs the wheel there, and from the lock file those of
its requirements that the image lacks or has too old. torch and CUDA are in no lock file for vLLM, so they are never
replaced. The exit status is 1 if a requirement cannot be met, or if a package of the image does not accept what was
added.
"""

import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement  # the only copy that is certain to be there
from pip._vendor.packaging.utils import canonicalize_name

_ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==(?:.*\\\n)*.*\n", re.MULTILINE)


class Unmet(Exception):
    """A requirement that cannot be met; the message names it and who has it."""


def main(lock: Path, wheel: Path) -> None:
    """Install the wheel and what it lacks. Raises Unmet."""
    if problem := mismatch(Requirement("vllm")):
        raise Unmet(f"{sys.executable} needs vllm, {problem}: choose a VLLM_BASE with vLLM in that Python")
    entries = {canonicalize_name(found[1]): found[0] for found in _ENTRY.finditer(lock.read_text(encoding="utf-8"))}
    install("--no-index", str(wheel))
    root, added = wheel.name.partition("-")[0], set[str]()
    while lacking := unmet(root):
        if impossible := sorted(name for name in lacking if name not in entries or name in added):
            raise Unmet(
                "; ".join(f"{lacking[name]}, and {lock.name} has no version that fits" for name in impossible)
                + ": choose another VLLM_BASE"
            )
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as chosen:
            chosen.write("".join(entries[name] for name in sorted(lacking)))
            chosen.flush()
            install("--require-hashes", "--only-binary=:all:", "-r", chosen.name)
        added |= lacking.keys()
    if refusing := sorted(refusals(added)):
        raise Unmet("; ".join(refusing) + ": choose another VLLM_BASE")


def install(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-cache-dir", "--no-compile", "--no-deps", *arguments]
    subprocess.run(command, check=True)
    importlib.invalidate_caches()


def unmet(root: str) -> dict[str, str]:
    """Return the packages that `root` needs, directly or not, and that are absent or do not fit; and why."""
    found: dict[str, str] = {}
    waiting, seen = [Requirement(root)], set[str]()
    while waiting:
        requirement = waiting.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        for needed in requirements(metadata.distribution(requirement.name), requirement.extras):
            if problem := mismatch(needed):
                found[canonicalize_name(needed.name)] = f"{requirement.name} needs {needed}, {problem}"
            else:
                waiting.append(needed)
    return found


def requirements(owner: metadata.Distribution, extras: set[str]) -> Iterator[Requirement]:
    """Yield a distribution's requirements in this environment, with those of its extras."""
    for text in owner.requires or ():
        needed = Requirement(text)
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield needed


def mismatch(needed: Requirement) -> str:
    """Return why the environment does not meet a requirement; empty if it does."""
    try:
        version = metadata.version(needed.name)
    except metadata.PackageNotFoundError:
        return "which is not installed"
    return "" if needed.specifier.contains(version, prereleases=True) else f"but {version} is installed"


def refusals(added: set[str]) -> Iterator[str]:
    """Yield the requirements of installed packages that the added packages do not meet."""
    visible = {canonicalize_name(each.name): each for each in reversed(list(metadata.distributions())) if each.name}
    for owner in visible.values():
        for needed in requirements(owner, set()):
            if canonicalize_name(needed.name) in added and (problem := mismatch(needed)):
                yield f"{owner.name} needs {needed}, {problem}"


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except Unmet as error:
        sys.exit(f"error: {error}")
