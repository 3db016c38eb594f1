"""Programs needed on the host: found on PATH, or fetched into the cache folder without installing them."""

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.rdma_vm import recipe
from tools.rdma_vm.errors import BuildFailed, MissingTool, UnsupportedHost
from tools.rdma_vm.progress import Deadline, say

_SYSTEM_PATHS = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True)
class Tools:
    """Paths of the tools. `environment`: variables that they need; `qemu_data`: empty if QEMU is installed."""

    qemu: Path
    qemu_data: tuple[Path, ...]
    mmdebstrap: Path
    environment: dict[str, str]


def check_host() -> None:
    """Raise UnsupportedHost if the test VM cannot run on this host."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise UnsupportedHost(f"the VM runs on Linux on x86-64 only, not on {sys.platform} on {platform.machine()}")
    if sys.version_info[:2] != recipe.PYTHON:
        wanted, found = (".".join(map(str, version)) for version in (recipe.PYTHON, sys.version_info[:2]))
        raise UnsupportedHost(
            f"the guest's Python {wanted} uses this environment's compiled packages, which are for {found}; "
            f"recreate the environment with `make distclean && make setup PYTHON=python{wanted}`"
        )


def find_program(name: str) -> Path | None:
    """Return the path of a program on PATH or in the system's folders, or None."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SYSTEM_PATHS}")
    return Path(found) if found else None


def require_program(name: str, package: str) -> Path:
    """Return the path of a program that cannot be fetched. Raises MissingTool, naming its Debian package."""
    found = find_program(name)
    if found is None:
        raise MissingTool(f"{name} is missing; install Debian's package {package}")
    return found


def obtain(cache: Path, deadline: Deadline) -> Tools:
    """Return QEMU and mmdebstrap from PATH, or from Debian's packages unpacked below `cache`.

    The caller must hold the cache's lock.

    Raises:
        MissingTool: neither the tools nor apt are installed.
        BuildFailed: the download failed, or apt considers tools installed that are not on PATH.
    """
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{_SYSTEM_PATHS}"}
    qemu, mmdebstrap = find_program("qemu-system-x86_64"), find_program("mmdebstrap")
    if qemu and mmdebstrap:
        return Tools(qemu, (), mmdebstrap, environment)
    prefix = cache / f"tools-{recipe.tools_key()}"
    fetched = prefix / "usr/bin/qemu-system-x86_64", prefix / "usr/bin/mmdebstrap"
    if not _are_there(qemu or fetched[0], mmdebstrap or fetched[1]):
        # Not fetched yet, or fetched when another tool was installed: apt skips installed packages.
        shutil.rmtree(prefix, ignore_errors=True)
        _fetch(prefix, deadline)
    if not _are_there(qemu or fetched[0], mmdebstrap or fetched[1]):
        raise BuildFailed(
            f"apt considers {' and '.join(recipe.TOOL_PACKAGES)} installed, but their programs are not on PATH; "
            "reinstall them"
        )
    libraries = ":".join(str(prefix / folder / "x86_64-linux-gnu") for folder in ("usr/lib", "lib"))
    environment |= {"LD_LIBRARY_PATH": libraries, "PATH": f"{prefix}/usr/bin:{environment['PATH']}"}
    data = () if qemu else tuple(prefix / "usr" / folder for folder in ("share/qemu", "share/seabios", "lib/ipxe/qemu"))
    return Tools(qemu or fetched[0], data, mmdebstrap or fetched[1], environment)


def _are_there(*programs: Path) -> bool:
    return all(program.is_file() for program in programs)


def _fetch(prefix: Path, deadline: Deadline) -> None:
    apt, unpack = require_program("apt-get", "apt"), require_program("dpkg-deb", "dpkg")
    say(f"fetching {' and '.join(recipe.TOOL_PACKAGES)} into {prefix} (nothing is installed)")
    fresh = prefix.with_name("tools.partial")
    shutil.rmtree(fresh, ignore_errors=True)
    archives = fresh / "archives"
    (archives / "partial").mkdir(parents=True)
    options = [
        "-qq",
        "-o",
        f"Dir::Cache={fresh}",
        "-o",
        f"Dir::Cache::archives={archives}",
        "-o",
        "Debug::NoLocking=true",
    ]
    install = [str(apt), "install", "--download-only", "--no-install-recommends", "--yes", *recipe.TOOL_PACKAGES]
    try:
        done = _run([*install, *options], deadline)
        if done.returncode:
            # The machine's package lists may be outdated or missing: fetch separate ones from the machine's sources.
            lists = fresh / "lists"
            (lists / "partial").mkdir(parents=True)
            options += ["-o", f"Dir::State::lists={lists}"]
            done = _run([str(apt), "update", *options], deadline)
            done = done if done.returncode else _run([*install, *options], deadline)
            shutil.rmtree(lists)
    except subprocess.TimeoutExpired:
        raise deadline.error(f"downloading {', '.join(recipe.TOOL_PACKAGES)}") from None
    if done.returncode:
        raise BuildFailed(
            f"apt could not download {', '.join(recipe.TOOL_PACKAGES)}: {done.stderr.strip()[-500:]}\n"
            "Check the machine's apt sources and network and try again, or install the packages."
        )
    for archive in sorted(archives.glob("*.deb")):
        subprocess.run([unpack, "-x", archive, fresh], check=True)
    shutil.rmtree(archives)
    fresh.rename(prefix)


def _run(command: list[str], deadline: Deadline) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=deadline.left())
