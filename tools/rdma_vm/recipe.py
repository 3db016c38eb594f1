"""Contents of the VM image, and the key under which it is cached. Pure.

The key is a hash of everything that determines the image, including this file, so the next run after a change builds a
new image. `guest/boot.sh`, which runs once the root filesystem is mounted, is not part of the image but is passed to
each run.
"""

import hashlib
from pathlib import Path

SUITE = "bookworm"
# The guest uses the packages of the host's Python environment, so both need the same Python version.
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
# Not needed in the guest.
EXCLUDED_PATHS = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")

# Debian's metapackage of the generic kernel, resolved to the newest version at build time. (The cloud kernel has no
# rdma_rxe.)
KERNEL_METAPACKAGE = "linux-image-amd64"
# Loaded by the initramfs, to mount the root filesystem and the folders of the host.
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
