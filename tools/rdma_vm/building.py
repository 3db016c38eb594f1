"""Build steps of an image; each runs an external program."""

import contextlib
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

from tools.rdma_vm import recipe
from tools.rdma_vm.errors import BuildFailed, NotPermitted
from tools.rdma_vm.progress import Deadline
from tools.rdma_vm.tools import Tools, find_program, require_program

_CLEARING_LIMIT_S = 20.0


def bootstrap(work: Path, tools: Tools, deadline: Deadline) -> None:
    """Write the root filesystem, with kernel and initramfs in boot/, to `work`/root.tar.

    Raises BuildFailed, VmDeadlineExceeded, NotPermitted.
    """
    (work / "tmp").mkdir(mode=0o777)
    (work / "tmp").chmod(0o777)
    package = Path(__file__).parent
    hook = f'PYTHONPATH="{package.parents[1]}" "{sys.executable}" -m tools.rdma_vm.guest_kernel "$1"'
    isolation = _isolation()
    # In a separate PID and mount namespace nothing outlives mmdebstrap; otherwise it must unmount by itself.
    end = signal.SIGKILL if isolation else signal.SIGTERM
    command = [str(require_program("setpriv", "util-linux")), "--pdeathsig", end.name.removeprefix("SIG"), *isolation]
    command += ["perl", str(tools.mmdebstrap), "--variant=minbase"]
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
            raise deadline.error("building the root filesystem") from None
        finally:
            for number in (end, signal.SIGKILL):
                if process.poll() is None:
                    os.killpg(process.pid, number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_CLEARING_LIMIT_S)
    if status:
        raise BuildFailed(
            f"mmdebstrap ended with status {status}:\n{log.read_text(errors='replace')[-2000:]}\n"
            "If a download failed, check the network and apt's proxy settings, and run again."
        )


def _isolation() -> list[str]:
    """Return the command prefix for mmdebstrap that prevents mounts and processes from outliving it.

    Raises NotPermitted if the user is not root and has no subordinate ids, or the kernel has no user namespaces.
    """
    unshare = find_program("unshare")
    if os.geteuid() == 0:
        own = [str(unshare), "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        usable = unshare and subprocess.run([*own, "true"], capture_output=True).returncode == 0
        return own if usable else []
    mapped = [str(unshare), "--map-root-user", "--map-auto", "true"]
    if not unshare or subprocess.run(mapped, capture_output=True).returncode:
        raise NotPermitted(
            "building a root filesystem requires root, or user namespaces with subordinate ids (Debian's package "
            "uidmap and an entry for this user in /etc/subuid and /etc/subgid)"
        )
    return []


def unpack(archive: Path, root: Path) -> None:
    """Unpack everything except devices, without owners, since the guest has only root."""

    def kept(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        return None if member.isdev() else member

    with tarfile.open(archive) as tar:
        tar.extractall(root, filter=kept)


def make_disk(make_filesystem: Path, root: Path, disk: Path, deadline: Deadline) -> None:
    """Write an ext4 image of the tree below `root`. Raises BuildFailed, VmDeadlineExceeded."""
    used = sum(path.lstat().st_size + 4096 for path in root.rglob("*"))
    command = [str(make_filesystem), "-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d", str(root), str(disk)]
    try:
        done = subprocess.run(
            [*command, f"{(used * 12 // 10 >> 20) + 32}M"], capture_output=True, text=True, timeout=deadline.left()
        )
    except subprocess.TimeoutExpired:
        raise deadline.error("building the disk image") from None
    if done.returncode:
        raise BuildFailed(f"mke2fs ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
