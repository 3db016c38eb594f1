"""Modules in an order in which they load, the archive that the kernel unpacks, the kernel without its wrapping."""

import lzma

import pytest

from tools.rdma_vm import initramfs
from tools.rdma_vm.errors import BuildFailed


def test_a_modules_needs_are_read_from_its_file() -> None:
    file = b"\x7fELF..\0license=GPL\0depends=ib_uverbs,udp-tunnel\0name=rdma_rxe\0"
    assert initramfs.needed_modules(file) == ["ib_uverbs", "udp_tunnel"]
    assert initramfs.needed_modules(b"\x7fELF..\0depends=\0name=dummy\0") == []
    assert initramfs.needed_modules(b"\x7fELF..\0") == []


def test_a_module_comes_once_and_after_all_that_it_needs() -> None:
    needs = {"rxe": ["uverbs", "tunnel"], "uverbs": ["core"], "tunnel": [], "core": [], "other": ["core"]}
    assert initramfs.closure(["rxe", "other", "rxe", "built_in"], needs) == ["core", "uverbs", "tunnel", "rxe", "other"]


def _entries(archive: bytes) -> dict[str, tuple[int, bytes]]:
    """Mode and content by name, as the kernel's documentation lays a newc archive out."""
    found, at = {}, 0
    while True:
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * field : at + 14 + 8 * field], 16) for field in range(13)]
        mode, size, name_size = fields[1], fields[6], fields[11]
        name = archive[at + 110 : at + 109 + name_size].decode()
        begin = -(-(at + 110 + name_size) // 4) * 4
        if name == "TRAILER!!!":
            return found
        found[name] = (mode, archive[begin : begin + size])
        at = -(-(begin + size) // 4) * 4


def test_the_archive_holds_every_file_after_its_folders() -> None:
    files = {"init": b"#!/bin/sh\n", "bin/busybox": bytes(range(255)), "modules/a/x.ko": b""}
    entries = _entries(initramfs.cpio(files))
    assert {name: content for name, (mode, content) in entries.items() if mode & 0o100000} == files
    assert {name for name, (mode, _) in entries.items() if mode == 0o040755} == {"bin", "modules", "modules/a"}
    assert list(entries).index("modules") < list(entries).index("modules/a") < list(entries).index("modules/a/x.ko")


def test_the_kernel_is_found_inside_its_wrapping() -> None:
    kernel = b"\x7fELF" + bytes(1000)
    assert initramfs.unpacked_kernel(b"MZ loader" + lzma.compress(kernel, lzma.FORMAT_XZ) + b"size") == kernel


def test_a_kernel_wrapped_otherwise_is_refused() -> None:
    with pytest.raises(BuildFailed, match="xz"):
        initramfs.unpacked_kernel(b"MZ loader")
