"""Registering GPU memory with an RDMA device, so that the adapter reads and writes it without the host's memory.

NOT YET PROVEN ON HARDWARE: written by the documented interfaces; no GPU with an RDMA adapter has run it.

Two ways:
- dmabuf: the driver exports a descriptor of the address range (cuMemGetHandleForAddressRange, CUDA 11.7 and the open
  kernel modules), which the adapter's driver imports (ibv_reg_dmabuf_mr, Linux 5.12). Nothing else has to be loaded.
- peer memory: a device pointer is registered like any other, and the module nvidia-peermem (formerly nv_peer_mem) tells
  the adapter's driver where it is.

dmabuf is tried first, being what both drivers are maintained for. Sources: CUDA driver API, "Virtual Memory Management"
and "Unified Addressing"; NVIDIA, "GPUDirect RDMA", on SYNC_MEMOPS; rdma-core, ibv_reg_dmabuf_mr(3).
"""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from messenger.errors import GpuMemoryUnsupported
from messenger.rdma.policy.facts import Place
from messenger.rdma.topology import ROOT, pci_place

_SYNC_MEMOPS, _DEVICE_ORDINAL = 6, 9  # CUpointer_attribute
_DMABUF_SUPPORTED: Final = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
_AS_DMABUF: Final = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_PEER_MODULES: Final = ("nvidia_peermem", "nv_peer_mem")

_NO_PEER_MODULE: Final = "the module nvidia-peermem is not loaded (modprobe nvidia-peermem)"
_NO_DMABUF: Final = (
    "the GPU's driver exports no dmabuf (it needs CUDA 11.7 and the open kernel modules, on a GPU of Turing or later)"
)


class Way(Enum):
    """How the adapter's driver learns where GPU memory is."""

    DMABUF = "dmabuf"
    PEER_MEMORY = "peer memory"


@dataclass(frozen=True)
class GpuMemory:
    """Memory of a GPU by its device pointer, as of a torch tensor's data_ptr(); it must outlive its registration."""

    address: int
    nbytes: int


@dataclass(frozen=True)
class Allocation:
    """The allocation that a device pointer lies in, and the GPU whose it is."""

    base: int
    nbytes: int
    gpu: int


@dataclass(frozen=True)
class Span:
    """Whole pages around a piece of memory: `start` and `nbytes` of the pages, `offset` of the memory within them."""

    start: int
    nbytes: int
    offset: int


@dataclass(frozen=True)
class Registered:
    """`mr` is pyverbs' registration. `first_address` is where verbs count the memory's first byte from: a device
    pointer by peer memory, an offset in the exported pages by dmabuf."""

    mr: Any
    first_address: int
    way: Way


class CudaDriver:
    """The few calls of libcuda that registering needs. Raises GpuMemoryUnsupported wherever one fails."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self._cuda = ctypes.CDLL(library)
        except OSError as error:
            raise GpuMemoryUnsupported(
                f"{library} cannot be loaded ({error}): install the user-space part of NVIDIA's driver"
            ) from error
        self._call("cuInit", ctypes.c_uint(0))

    def allocation(self, memory: GpuMemory) -> Allocation:
        """Of what the memory lies in, all of it."""
        base, nbytes, gpu = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_int()
        pointer = ctypes.c_uint64(memory.address)
        self._call("cuPointerGetAttribute", ctypes.byref(gpu), _DEVICE_ORDINAL, pointer)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), pointer)
        found = Allocation(base.value, nbytes.value, gpu.value)
        if not found.base <= memory.address <= memory.address + memory.nbytes <= found.base + found.nbytes:
            raise GpuMemoryUnsupported(
                f"{memory.nbytes} bytes at {memory.address:#x} reach beyond their allocation of {found.nbytes} bytes "
                f"at {found.base:#x}: register pieces of one allocation each"
            )
        return found

    def exports_dmabuf(self, gpu: int) -> bool:
        value, device = ctypes.c_int(), self._device(gpu)
        self._call("cuDeviceGetAttribute", ctypes.byref(value), _DMABUF_SUPPORTED, device)
        return bool(value.value)

    def place(self, gpu: int, root: Path = ROOT) -> Place:
        """Where the GPU sits, for the choice of adapters."""
        text = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", text, len(text), self._device(gpu))
        return pci_place(text.value.decode(), root)

    def keep_in_order(self, memory: GpuMemory, gpu: int) -> None:
        """Have the driver finish its own copies to and from the memory before it returns: an adapter does not wait for
        its streams."""
        with self._context(gpu):
            flag = ctypes.c_uint(1)
            self._call("cuPointerSetAttribute", ctypes.byref(flag), _SYNC_MEMOPS, ctypes.c_uint64(memory.address))

    def export(self, span: Span, gpu: int) -> int:
        """A descriptor of the pages, which the caller closes."""
        descriptor = ctypes.c_int(-1)
        arguments = (ctypes.c_uint64(span.start), ctypes.c_size_t(span.nbytes), _AS_DMABUF, ctypes.c_ulonglong(0))
        with self._context(gpu):
            self._call("cuMemGetHandleForAddressRange", ctypes.byref(descriptor), *arguments)
        return descriptor.value

    @contextlib.contextmanager
    def _context(self, gpu: int) -> Iterator[None]:
        """The GPU's primary context, which torch uses too, current on this thread."""
        context, popped, device = ctypes.c_void_p(), ctypes.c_void_p(), self._device(gpu)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(popped))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", device)

    def _device(self, gpu: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), gpu)
        return device

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._cuda, name)
        except AttributeError:
            raise GpuMemoryUnsupported(f"the NVIDIA driver is too old: it has no {name}") from None
        code = function(*arguments)
        if code:
            raise GpuMemoryUnsupported(f"{name} failed with CUDA error {code}")


def has_peer_memory(root: Path = ROOT) -> bool:
    """Whether the kernel has a module that lets adapters' drivers register device pointers."""
    return any((root / "sys/module" / name).is_dir() for name in _PEER_MODULES)


def ways(exports_dmabuf: bool, peer_memory: bool) -> tuple[Way, ...]:
    """Those to try, the best first. Raises GpuMemoryUnsupported, naming what is missing, when there is none."""
    found = (*((Way.DMABUF,) if exports_dmabuf else ()), *((Way.PEER_MEMORY,) if peer_memory else ()))
    if not found:
        raise GpuMemoryUnsupported(f"GPU memory cannot be registered for rdma: {_NO_DMABUF}, and {_NO_PEER_MODULE}")
    return found


def page_span(memory: GpuMemory, page_nbytes: int = mmap.PAGESIZE) -> Span:
    """The whole host pages that the memory lies in: what the driver exports must begin and end with one."""
    start = memory.address // page_nbytes * page_nbytes
    end = -(-(memory.address + memory.nbytes) // page_nbytes) * page_nbytes
    return Span(start, end - start, memory.address - start)


def first_that_works(attempts: dict[Way, Callable[[], Registered]]) -> Registered:
    """The first registration that succeeds. Raises GpuMemoryUnsupported with every way's reason when none does."""
    reasons = []
    for way, attempt in attempts.items():
        try:
            return attempt()
        except (OSError, GpuMemoryUnsupported) as error:
            reasons.append(f"by {way.value}: {error}")
    raise GpuMemoryUnsupported(f"GPU memory cannot be registered for rdma; {'; '.join(reasons)}")


def register(
    pd: Any, memory: GpuMemory, access: int, *, driver: CudaDriver, peer_memory: bool | None = None
) -> Registered:
    """Register with a pyverbs protection domain; `access` as for host memory. Close the result's `mr` before the memory
    is freed. `peer_memory` None: look. Raises GpuMemoryUnsupported."""
    allocation = driver.allocation(memory)
    known = has_peer_memory() if peer_memory is None else peer_memory
    possible = ways(driver.exports_dmabuf(allocation.gpu), known)
    driver.keep_in_order(memory, allocation.gpu)
    attempts: dict[Way, Callable[[], Registered]] = {
        Way.DMABUF: lambda: _by_dmabuf(pd, memory, access, driver, allocation.gpu),
        Way.PEER_MEMORY: lambda: _by_peer_memory(pd, memory, access),
    }
    return first_that_works({way: attempts[way] for way in possible})


def _by_dmabuf(pd: Any, memory: GpuMemory, access: int, driver: CudaDriver, gpu: int) -> Registered:
    span = page_span(memory)
    descriptor = driver.export(span, gpu)
    try:
        with _as_os_errors():
            from pyverbs.mr import DmaBufMR

            mr = DmaBufMR(pd, memory.nbytes, access, dmabuf=descriptor, offset=span.offset)
    finally:
        os.close(descriptor)  # the registration holds the buffer by itself
    return Registered(mr, span.offset, Way.DMABUF)


def _by_peer_memory(pd: Any, memory: GpuMemory, access: int) -> Registered:
    with _as_os_errors():
        from pyverbs.mr import MR

        mr = MR(pd, memory.nbytes, access, address=memory.address)
    return Registered(mr, memory.address, Way.PEER_MEMORY)


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        from pyverbs.pyverbs_error import PyverbsError
    except ImportError as error:
        raise GpuMemoryUnsupported(f"pyverbs cannot be imported ({error}): install python3-pyverbs") from error
    try:
        yield
    except PyverbsError as error:
        raise OSError(getattr(error, "error_code", 0), str(error)) from error
