"""VM image: built once per recipe, published atomically, shared by all runs."""

import contextlib
import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.rdma_vm import recipe
from tools.rdma_vm.building import bootstrap, make_disk, unpack
from tools.rdma_vm.errors import NoSpace, NotPermitted
from tools.rdma_vm.progress import Deadline, say
from tools.rdma_vm.tools import Tools, obtain, require_program

_NEEDED_BYTES = 3 << 30
_KEPT_IMAGES = 2


@dataclass(frozen=True)
class Image:
    """Files of a built image; read-only."""

    root: Path
    kernel: Path
    initramfs: Path

    @classmethod
    def at(cls, folder: Path) -> "Image":
        """Return the image in `folder`."""
        return cls(folder / "root.img", folder / "vmlinux", folder / "initramfs")


def provide(cache: Path, deadline: Deadline) -> tuple[Image, Tools]:
    """Return the image of the current recipe and the tools, after building and fetching them if `cache` lacks them.

    Raises VmError.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        (cache / "lock").touch()
    except OSError as error:
        raise NotPermitted(f"cannot write to {cache} ({error}); set RDMA_VM_CACHE to another folder") from None
    folder = cache / f"image-{recipe.image_key()}"
    with _locked(cache / "lock", deadline):
        tools = obtain(cache, deadline)
        if not folder.exists():
            _build(folder, tools, deadline)
            _forget_old(cache, folder)
    return Image.at(folder), tools


@contextlib.contextmanager
def _locked(path: Path, deadline: Deadline) -> Iterator[None]:
    """Hold the cache's lock, which the kernel releases when the process dies."""
    with path.open("w") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline.passed():
                    raise deadline.error("waiting for another run to build the image") from None
                if not told:
                    say("waiting for another run that is building the image")
                    told = True
                time.sleep(0.2)
        yield


def _build(folder: Path, tools: Tools, deadline: Deadline) -> None:
    """Build the image and publish it as `folder` once it is complete."""
    free = shutil.disk_usage(folder.parent).free
    if free < _NEEDED_BYTES:
        raise NoSpace(
            f"{folder.parent} has {free >> 20} MiB free, but the build needs {_NEEDED_BYTES >> 20}: "
            "free some space, or set RDMA_VM_CACHE to another folder"
        )
    make_filesystem = require_program("mke2fs", "e2fsprogs")
    began = time.monotonic()
    for left_behind in folder.parent.glob("build-*"):
        shutil.rmtree(left_behind, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder.parent) as name:
        work = Path(name)
        work.chmod(0o755)
        say(f"building the image in {folder.parent}, once: 1/3 a {recipe.SUITE} root filesystem")
        bootstrap(work, tools, deadline)
        say(f"2/3 unpacking, after {time.monotonic() - began:.0f} s")
        root = work / "root"
        unpack(work / "root.tar", root)
        fresh = work / "image"
        fresh.mkdir()
        for part in ("vmlinux", "initramfs"):
            (root / "boot" / part).rename(fresh / part)
        say(f"3/3 the disk image, after {time.monotonic() - began:.0f} s")
        make_disk(make_filesystem, root, fresh / "root.img", deadline)
        fresh.rename(folder)
    size = sum(part.stat().st_size for part in folder.iterdir())
    say(f"built in {time.monotonic() - began:.0f} s, {size >> 20} MiB")


def _forget_old(cache: Path, newest: Path) -> None:
    """Delete all but the newest images; running VMs are unaffected because they keep their image open."""
    older = sorted((path for path in cache.glob("image-*") if path != newest), key=lambda path: path.stat().st_mtime)
    for folder in older[: max(len(older) - _KEPT_IMAGES + 1, 0)]:
        shutil.rmtree(folder)
