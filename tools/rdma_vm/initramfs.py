"""Preparation of the guest's kernel: module dependencies, cpio archive of the initramfs, decompressed kernel. Pure."""

import lzma
import stat
from collections.abc import Iterable, Mapping

from tools.rdma_vm.errors import BuildFailed

_XZ_MAGIC = b"\xfd7zXZ\0"


def module_name(file_name: str) -> str:
    """Return the module's name for a file name: `crc32c-intel.ko` is `crc32c_intel`."""
    return file_name.split(".")[0].replace("-", "_")


def needed_modules(module: bytes) -> list[str]:
    """Return the direct dependencies of a module, from the text of its .modinfo section."""
    at = module.find(b"\0depends=")
    if at < 0:
        return []
    names = module[at + len(b"\0depends=") : module.index(b"\0", at + 1)].decode()
    return [module_name(name) for name in names.split(",") if name]


def closure(wanted: Iterable[str], needs: Mapping[str, list[str]]) -> list[str]:
    """Return `wanted` and all dependencies in load order. Names not in `needs` are assumed to be built in."""
    order: list[str] = []

    def add(name: str) -> None:
        if name in needs and name not in order:
            for other in needs[name]:
                add(other)
            order.append(name)

    for name in wanted:
        add(name)
    return order


def cpio(files: Mapping[str, bytes]) -> bytes:
    """Return a `newc` archive of executable files and their folders; paths have no leading slash."""
    folders = {"/".join(path.split("/")[:depth]) for path in files for depth in range(1, path.count("/") + 1)}
    entries = [(name, stat.S_IFDIR | 0o755, b"") for name in sorted(folders)]
    entries += [(name, stat.S_IFREG | 0o755, files[name]) for name in sorted(files)]
    entries.append(("TRAILER!!!", 0, b""))
    archive = bytearray()
    for inode, (name, mode, content) in enumerate(entries, start=1):
        path = name.encode() + b"\0"
        fields = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0)
        archive += b"070701" + b"".join(b"%08X" % field for field in fields) + path
        archive += bytes(-len(archive) % 4)
        archive += content
        archive += bytes(-len(archive) % 4)
    return bytes(archive)


def unpacked_kernel(vmlinuz: bytes) -> bytes:
    """Return the ELF image inside a compressed kernel, to save an emulated guest the decompression.

    Raises BuildFailed if the kernel is not compressed with xz, as Debian's is.
    """
    at = vmlinuz.find(_XZ_MAGIC)
    if at < 0:
        raise BuildFailed(
            "the kernel is not compressed with xz; tools/rdma_vm/initramfs.py does not support other formats"
        )
    return lzma.LZMADecompressor().decompress(vmlinuz[at:])
