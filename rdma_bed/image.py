"""The VM image: built once per recipe, published whole or not at all, shared by every run."""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rdma_bed import recipe
from rdma_bed.errors import BuildFailed, NoSpace, NotPermitted
from rdma_bed.progress import Deadline, say
from rdma_bed.tools import Tools, find_program, obtain, require_program

_NEEDED_BYTES = 3 << 30
_KEPT_IMAGES = 2


@dataclass(frozen=True)
class Image:
    """The files of a built image; nobody writes to them."""

    root: Path
    kernel: Path
    initramfs: Path

    @classmethod
    def at(cls, folder: Path) -> "Image":
        """The image in `folder`."""
        return cls(folder / "root.img", folder / "vmlinux", folder / "initramfs")


def provide(cache: Path, deadline: Deadline) -> tuple[Image, Tools]:
    """The image of today's recipe and the tools, built and fetched first where they are not in `cache` yet."""
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"image-{recipe.image_key()}"
    with _locked(cache / "lock", deadline):
        tools = obtain(cache, deadline)
        if not folder.exists():
            _build(folder, tools, deadline)
            _forget_old(cache, folder)
    return Image.at(folder), tools


@contextlib.contextmanager
def _locked(path: Path, deadline: Deadline) -> Iterator[None]:
    """Holds the cache's lock, which the system takes back from a process that dies."""
    with path.open("w") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline.passed():
                    raise deadline.error("waiting for another run that builds the image") from None
                if not told:
                    say("another run is building the image: waiting for it")
                    told = True
                time.sleep(0.2)
        yield


def _build(folder: Path, tools: Tools, deadline: Deadline) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < _NEEDED_BYTES:
        raise NoSpace(
            f"{folder.parent} has {free >> 20} MiB free and the build needs {_NEEDED_BYTES >> 20}: "
            "make room, or name another folder by RDMA_BED_CACHE"
        )
    make_filesystem = require_program("mke2fs", "e2fsprogs")
    began = time.monotonic()
    for left_behind in folder.parent.glob("build-*"):
        shutil.rmtree(left_behind, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder.parent) as name:
        work = Path(name)
        work.chmod(0o755)
        say(f"building the image in {folder.parent}, once: 1/3 a {recipe.SUITE} root filesystem")
        _bootstrap(work, tools, deadline)
        say(f"2/3 unpacking, after {time.monotonic() - began:.0f} s")
        root = work / "root"
        _unpack(work / "root.tar", root)
        fresh = work / "image"
        fresh.mkdir()
        for part in ("vmlinux", "initramfs"):
            (root / "boot" / part).rename(fresh / part)
        say(f"3/3 the disk image, after {time.monotonic() - began:.0f} s")
        _make_disk(make_filesystem, root, fresh / "root.img", deadline)
        fresh.rename(folder)
    size = sum(part.stat().st_size for part in folder.iterdir())
    say(f"built in {time.monotonic() - began:.0f} s, {size >> 20} MiB")


def _bootstrap(work: Path, tools: Tools, deadline: Deadline) -> None:
    """Leaves the root filesystem, with kernel and initramfs in boot/, in `work`/root.tar."""
    (work / "tmp").mkdir(mode=0o777)
    (work / "tmp").chmod(0o777)
    package = Path(__file__).parent
    hook = f'PYTHONPATH="{package.parent}" "{sys.executable}" -m rdma_bed.guest_kernel "$1"'
    command = [*_isolation(), "perl", str(tools.mmdebstrap), "--variant=minbase"]
    command += ["--mode=root" if os.geteuid() == 0 else "--mode=unshare", f"--include={','.join(recipe.PACKAGES)}"]
    command += [f"--dpkgopt=path-exclude={path}" for path in recipe.EXCLUDED_PATHS]
    command += [f"--customize-hook={hook}", recipe.SUITE, str(work / "root.tar")]
    environment = {**tools.environment, "TMPDIR": str(work / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    log = work / "mmdebstrap.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(deadline.left())
        except subprocess.TimeoutExpired:
            raise deadline.error("making the root filesystem") from None
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    if status:
        raise BuildFailed(
            f"mmdebstrap ended with status {status}:\n{log.read_text(errors='replace')[-2000:]}\n"
            "If a download failed: check the network, and apt's proxy if there is one, and run again."
        )


def _isolation() -> list[str]:
    """What to run mmdebstrap under, so that neither mounts nor processes outlive it.

    Raises:
        NotPermitted: neither root nor a user with subordinate ids in a kernel with user namespaces.
    """
    unshare = find_program("unshare")
    if os.geteuid() == 0:
        own = [str(unshare), "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        usable = unshare and subprocess.run([*own, "true"], capture_output=True).returncode == 0
        return own if usable else []
    mapped = [str(unshare), "--map-root-user", "--map-auto", "true"]
    if not unshare or subprocess.run(mapped, capture_output=True).returncode:
        raise NotPermitted(
            "making a root filesystem needs root, or user namespaces with subordinate ids (Debian's package uidmap and "
            "an entry for this user in /etc/subuid and /etc/subgid)"
        )
    return []


def _unpack(archive: Path, root: Path) -> None:
    """Unpacks all but devices. Owners do not matter: in the guest there is only root."""

    def kept(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        return None if member.isdev() else member

    with tarfile.open(archive) as tar:
        tar.extractall(root, filter=kept)


def _make_disk(make_filesystem: Path, root: Path, disk: Path, deadline: Deadline) -> None:
    used = sum(path.lstat().st_size + 4096 for path in root.rglob("*"))
    command = [str(make_filesystem), "-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d", str(root), str(disk)]
    try:
        done = subprocess.run(
            [*command, f"{(used * 12 // 10 >> 20) + 32}M"], capture_output=True, text=True, timeout=deadline.left()
        )
    except subprocess.TimeoutExpired:
        raise deadline.error("making the disk image") from None
    if done.returncode:
        raise BuildFailed(f"mke2fs ended with status {done.returncode}: {done.stderr.strip()[-500:]}")


def _forget_old(cache: Path, newest: Path) -> None:
    """Keeps the newest images only. A VM that runs from one keeps it open, so nothing is taken from it."""
    older = sorted((path for path in cache.glob("image-*") if path != newest), key=lambda path: path.stat().st_mtime)
    for folder in older[: max(len(older) - _KEPT_IMAGES + 1, 0)]:
        shutil.rmtree(folder)
