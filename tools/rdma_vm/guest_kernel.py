"""Installation of a kernel, modules and an initramfs in the root filesystem, run by mmdebstrap.

`python -m tools.rdma_vm.guest_kernel ROOT` is a separate process because only mmdebstrap's (possibly unprivileged)
namespace may write to ROOT. It uses apt with the lists of the guest's suite, so the host's suite does not matter.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.rdma_vm import initramfs, recipe
from tools.rdma_vm.errors import BuildFailed


def main(root: Path) -> None:
    """Add usr/lib/modules/VERSION, boot/vmlinux and boot/initramfs to the filesystem at `root`."""
    with tempfile.TemporaryDirectory(prefix="rdma-vm-kernel-") as name:
        unpacked = Path(name)
        version = _download(unpacked)
        found = _install_modules(unpacked / "lib/modules" / version, root / "usr/lib/modules" / version)
        vmlinuz = (unpacked / f"boot/vmlinuz-{version}").read_bytes()
    subprocess.run(["chroot", root, "depmod", version], check=True)
    boot = root / "boot"
    boot.mkdir(exist_ok=True)
    (boot / "vmlinux").write_bytes(initramfs.unpacked_kernel(vmlinuz))
    files = {
        "init": (Path(__file__).parent / "guest/initramfs.sh").read_bytes(),
        "bin/busybox": (root / "usr/bin/busybox").read_bytes(),
    }
    needs = {module: initramfs.needed_modules(path.read_bytes()) for module, path in found.items()}
    for number, module in enumerate(initramfs.closure(recipe.BOOT_MODULES, needs)):
        files[f"modules/{number:02d}-{module}.ko"] = found[module].read_bytes()
    (boot / "initramfs").write_bytes(initramfs.cpio(files))


def _download(into: Path) -> str:
    """Fetch and unpack the newest generic kernel; return its version."""
    apt = {**os.environ, "APT_CONFIG": os.environ["MMDEBSTRAP_APT_CONFIG"]}
    depends = subprocess.run(
        ["apt-cache", "depends", recipe.KERNEL_METAPACKAGE], env=apt, check=True, capture_output=True, text=True
    )
    packages = [line.split()[-1] for line in depends.stdout.splitlines() if "Depends: linux-image-" in line]
    if not packages:
        raise BuildFailed(f"apt lists no kernel package for {recipe.KERNEL_METAPACKAGE}: {depends.stdout!r}")
    subprocess.run(["apt-get", "download", "-qq", packages[0]], env=apt, check=True, cwd=into)
    (archive,) = into.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", archive, into], check=True)
    return packages[0].removeprefix("linux-image-")


def _install_modules(source: Path, target: Path) -> dict[str, Path]:
    """Copy the required modules; return their files by name."""
    files = {initramfs.module_name(path.name): path for path in sorted(source.rglob("*.ko"))}
    needs = {module: initramfs.needed_modules(path.read_bytes()) for module, path in files.items()}
    builtin = {initramfs.module_name(Path(line).name) for line in (source / "modules.builtin").read_text().split()}
    missing = {*recipe.BOOT_MODULES, *recipe.MODULES} - files.keys() - builtin
    if missing:
        raise BuildFailed(
            f"kernel {source.name} has no module {', '.join(sorted(missing))}; update tools/rdma_vm/recipe.py"
        )
    installed = {}
    for module in initramfs.closure((*recipe.BOOT_MODULES, *recipe.MODULES), needs):
        copy = target / files[module].relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        installed[module] = Path(shutil.copy(files[module], copy))
    for name in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
        shutil.copy(source / name, target / name)
    return installed


if __name__ == "__main__":
    main(Path(sys.argv[1]))
