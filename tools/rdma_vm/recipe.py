"""Ingredients of the VM image, and the key under which it is cached. Data and arithmetic only.

The key is a hash over everything that determines the image, including this file: after a change the next run builds a
new one. `guest/boot.sh`, which runs once the root filesystem is mounted, is not part of the image but sent with each
run.
"""

import hashlib
from pathlib import Path

SUITE = "bookworm"
# The guest's Python has to be the one of the host's environment, whose packages it uses.
PYTHON = (3, 11)

PACKAGES = (
    "busybox-static",
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "iptables",
    "iputils-ping",
    "kmod",
    "perftest",
    "procps",
    "python3",
    "python3-pyverbs",
    "rdma-core",
)
# What nobody reads in there.
EXCLUDED_PATHS = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")

# Debian's metapackage of the generic kernel: its newest version is found out at build time. (The cloud kernel has no
# rdma_rxe.)
KERNEL_METAPACKAGE = "linux-image-amd64"
# Loaded by the initramfs, to reach the root filesystem and the folders of the host.
BOOT_MODULES = ("virtio_pci", "virtio_blk", "virtio_console", "crc32c_generic", "ext4", "overlay", "9pnet_virtio", "9p")
# Loaded on demand.
MODULES = (
    *("virtio_net", "virtio_rng", "dummy", "veth", "rdma_rxe", "ib_uverbs", "rdma_ucm"),
    *("crc32_generic", "crc32_pclmul", "crc32c_intel", "crct10dif_generic"),
    *("nf_tables", "nft_compat", "ip_tables", "iptable_filter", "ipt_REJECT"),
    *("xt_tcpudp", "xt_comment", "xt_limit", "xt_multiport", "xt_statistic", "xt_length", "xt_u32"),
    *("sch_netem", "sch_tbf"),
)

TOOL_PACKAGES = ("qemu-system-x86", "mmdebstrap")

_HERE = Path(__file__).parent
_INGREDIENTS = ("recipe.py", "building.py", "guest_kernel.py", "initramfs.py", "guest/initramfs.sh")


def tools_key() -> str:
    """Return the key of the unpacked tools."""
    return hashlib.sha256(" ".join(TOOL_PACKAGES).encode()).hexdigest()[:16]


def image_key(folder: Path = _HERE) -> str:
    """Return the image's key, 16 hexadecimal digits, from the files in `folder` that determine it."""
    digest = hashlib.sha256()
    for name in _INGREDIENTS:
        text = (folder / name).read_bytes()
        digest.update(f"{name} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()[:16]
