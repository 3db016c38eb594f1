"""Registration of GPU memory with an RDMA device, so that the adapter accesses it without a copy in host memory.

NOT YET TESTED ON HARDWARE: written to the documented interfaces, but not run on a GPU with an RDMA adapter.

There are two methods:
- dmabuf: the driver exports a descriptor of the address range (cuMemGetHandleForAddressRange, CUDA 11.7 and the open
  kernel modules), which the adapter's driver imports (ibv_reg_dmabuf_mr, Linux 5.12). No other module is needed.
- peer memory: a device pointer is registered like any other, and the module nvidia-peermem (formerly nv_peer_mem)
  translates it for the adapter's driver.

dmabuf is tried first, because it is the method that both drivers maintain. Sources: CUDA driver API, "Virtual Memory
Management" and "Unified Addressing"; NVIDIA, "GPUDirect RDMA", on SYNC_MEMOPS; rdma-core, ibv_reg_dmabuf_mr(3).
"""

import contextlib
import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from messenger.errors import GpuMemoryUnsupported
from messenger.memory import GpuMemory
from messenger.rdma.policy.facts import PciPosition
from messenger.rdma.registered import Registered
from messenger.rdma.topology import ROOT, bound_place, pci_place

_SYNC_MEMOPS, _DEVICE_ORDINAL = 6, 9  # CUpointer_attribute
# CU_DEVICE_ATTRIBUTE_...: GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, GPU_DIRECT_RDMA_WRITES_ORDERING, DMA_BUF_SUPPORTED
_FLUSH_OPTIONS, _WRITES_ORDERING, _DMABUF_SUPPORTED = 117, 118, 124
_FLUSH_BY_HOST: Final = 1
_ORDERED_FOR_OWNER: Final = 100
_OF_CONTEXT, _TO_OWNER = 0, 100  # CUflushGPUDirectRDMAWritesTarget and -Scope
_AS_DMABUF: Final = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_PEER_MODULES: Final = ("nvidia_peermem", "nv_peer_mem")

_NO_PEER_MODULE: Final = "the module nvidia-peermem is not loaded (modprobe nvidia-peermem)"
_NO_DMABUF: Final = (
    "the GPU's driver exports no dmabuf (it needs CUDA 11.7 and the open kernel modules, on a GPU of Turing or later)"
)

_log = logging.getLogger(__name__)


class ExportMethod(Enum):
    """Method by which the adapter's driver locates GPU memory."""

    DMABUF = "dmabuf"
    PEER_MEMORY = "peer memory"


@dataclass(frozen=True)
class Allocation:
    """The allocation that contains a device pointer, and the ordinal of its GPU."""

    base: int
    nbytes: int
    gpu: int


@dataclass(frozen=True)
class PageSpan:
    """Whole pages around a piece of memory: `start` and `nbytes` of the pages, `offset` of the memory within them."""

    start: int
    nbytes: int
    offset: int


class CudaDriver:
    """Calls of libcuda for registration. Each raises GpuMemoryUnsupported if it fails."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self._cuda = ctypes.CDLL(library)
        except OSError as error:
            raise GpuMemoryUnsupported(
                f"{library} cannot be loaded ({error}): install the user-space part of NVIDIA's driver"
            ) from error
        self._call("cuInit", ctypes.c_uint(0))

    def allocation(self, memory: GpuMemory) -> Allocation:
        """Return the allocation that contains the pointer."""
        base, nbytes, gpu = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_int()
        pointer = ctypes.c_uint64(memory.address)
        self._call("cuPointerGetAttribute", ctypes.byref(gpu), _DEVICE_ORDINAL, pointer)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), pointer)
        found = Allocation(base.value, nbytes.value, gpu.value)
        if not found.base <= memory.address <= memory.address + memory.nbytes <= found.base + found.nbytes:
            raise GpuMemoryUnsupported(
                f"{memory.nbytes} bytes at {memory.address:#x} reach beyond their allocation of {found.nbytes} bytes "
                f"at {found.base:#x}: register memory of one allocation at a time"
            )
        return found

    def exports_dmabuf(self, gpu: int) -> bool:
        return bool(self._attribute(_DMABUF_SUPPORTED, gpu))

    def place(self, gpu: int, root: Path = ROOT) -> PciPosition:
        """Return the PCI position of the GPU."""
        text = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", text, len(text), self._device(gpu))
        return pci_place(text.value.decode(), root)

    def keep_in_order(self, memory: GpuMemory, gpu: int) -> None:
        """Make the driver's copies to and from the memory synchronous, since an adapter does not wait for CUDA streams.

        Sets CU_POINTER_ATTRIBUTE_SYNC_MEMOPS.
        """
        with self._context(gpu):
            flag = ctypes.c_uint(1)
            self._call("cuPointerSetAttribute", ctypes.byref(flag), _SYNC_MEMOPS, ctypes.c_uint64(memory.address))

    def needs_flush(self, gpu: int) -> bool:
        """Return True if later work of the GPU sees an adapter's writes only after `flush`.

        Raises GpuMemoryUnsupported if a flush is needed and the host cannot do it.
        """
        if self._attribute(_WRITES_ORDERING, gpu) >= _ORDERED_FOR_OWNER:
            return False
        if not self._attribute(_FLUSH_OPTIONS, gpu) & _FLUSH_BY_HOST:
            raise GpuMemoryUnsupported(
                f"GPU {gpu} does not keep adapters' writes in order, and its driver cannot flush them"
            )
        return True

    def flush(self, gpu: int) -> None:
        """Make all earlier writes of adapters visible to work submitted to the GPU afterwards."""
        with self._context(gpu):
            self._call("cuFlushGPUDirectRDMAWrites", _OF_CONTEXT, _TO_OWNER)

    def export(self, span: PageSpan, gpu: int) -> int:
        """Return a dmabuf descriptor of the pages, which the caller must close."""
        descriptor = ctypes.c_int(-1)
        arguments = (ctypes.c_uint64(span.start), ctypes.c_size_t(span.nbytes), _AS_DMABUF, ctypes.c_ulonglong(0))
        with self._context(gpu):
            self._call("cuMemGetHandleForAddressRange", ctypes.byref(descriptor), *arguments)
        return descriptor.value

    @contextlib.contextmanager
    def _context(self, gpu: int) -> Iterator[None]:
        """Make the GPU's primary context, which torch also uses, current on this thread."""
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

    def _attribute(self, number: int, gpu: int) -> int:
        value, device = ctypes.c_int(), self._device(gpu)
        self._call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value

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


def place_of(gpu: int | None, root: Path = ROOT) -> PciPosition:
    """Return the position near which adapters are chosen: the GPU's, or this process's if `gpu` is None."""
    if gpu is None:
        return bound_place(root)
    try:
        return CudaDriver().place(gpu, root)
    except GpuMemoryUnsupported as error:
        _log.warning("rdma devices are not chosen by their distance to GPU %d: %s", gpu, error)
        return bound_place(root)


def has_peer_memory(root: Path = ROOT) -> bool:
    """Return True if the kernel has a module that lets adapter drivers register device pointers."""
    return any((root / "sys/module" / name).is_dir() for name in _PEER_MODULES)


def ways(exports_dmabuf: bool, peer_memory: bool) -> tuple[ExportMethod, ...]:
    """Return the methods to try, best first. Raises GpuMemoryUnsupported, with what is missing, if there is none."""
    found = (*((ExportMethod.DMABUF,) if exports_dmabuf else ()), *((ExportMethod.PEER_MEMORY,) if peer_memory else ()))
    if not found:
        raise GpuMemoryUnsupported(f"GPU memory cannot be registered for rdma: {_NO_DMABUF}, and {_NO_PEER_MODULE}")
    return found


def page_span(memory: GpuMemory, page_nbytes: int = mmap.PAGESIZE) -> PageSpan:
    """Return the whole host pages around the memory, since an exported range must start and end at page boundaries."""
    start = memory.address // page_nbytes * page_nbytes
    end = -(-(memory.address + memory.nbytes) // page_nbytes) * page_nbytes
    return PageSpan(start, end - start, memory.address - start)


def first_that_works(
    attempts: dict[ExportMethod, Callable[[], list[Registered]]],
) -> tuple[ExportMethod, list[Registered]]:
    """Return (method, registrations) of the first method that succeeds.

    Raises GpuMemoryUnsupported with every method's reason if none does.
    """
    reasons = []
    for way, attempt in attempts.items():
        try:
            return way, attempt()
        except (OSError, GpuMemoryUnsupported) as error:
            reasons.append(f"by {way.value}: {error}")
    raise GpuMemoryUnsupported(f"GPU memory cannot be registered for rdma; {'; '.join(reasons)}")


def register(
    pds: Sequence[Any], memory: GpuMemory, access: int, *, driver: CudaDriver, peer_memory: bool | None = None
) -> tuple[ExportMethod, list[Registered]]:
    """Register the memory with pyverbs protection domains, all by one method; `access` as for host memory.

    Returns (method, one registration per domain), which must be closed before the memory is freed. If `peer_memory` is
    None, the loaded kernel modules are checked. Raises GpuMemoryUnsupported.
    """
    allocation = driver.allocation(memory)
    known = has_peer_memory() if peer_memory is None else peer_memory
    possible = ways(driver.exports_dmabuf(allocation.gpu), known)
    needs_flush = driver.needs_flush(allocation.gpu)
    driver.keep_in_order(memory, allocation.gpu)

    def settle() -> None:
        if needs_flush:
            driver.flush(allocation.gpu)

    def by_dmabuf(pd: Any) -> Registered:
        return _by_dmabuf(pd, memory, access, driver, allocation.gpu, settle)

    def by_peer_memory(pd: Any) -> Registered:
        return _by_peer_memory(pd, memory, access, settle)

    attempts: dict[ExportMethod, Callable[[], list[Registered]]] = {
        ExportMethod.DMABUF: lambda: _everywhere(pds, by_dmabuf),
        ExportMethod.PEER_MEMORY: lambda: _everywhere(pds, by_peer_memory),
    }
    return first_that_works({way: attempts[way] for way in possible})


def _everywhere(pds: Sequence[Any], register_with: Callable[[Any], Registered]) -> list[Registered]:
    """Register with every protection domain, or with none."""
    with contextlib.ExitStack() as undo:
        made: list[Registered] = []
        for pd in pds:
            one = register_with(pd)
            undo.callback(one.close)
            made.append(one)
        undo.pop_all()
    return made


def _by_dmabuf(
    pd: Any, memory: GpuMemory, access: int, driver: CudaDriver, gpu: int, settle: Callable[[], None]
) -> Registered:
    span = page_span(memory)
    descriptor = driver.export(span, gpu)
    try:
        with _as_os_errors():
            from pyverbs.mr import DmaBufMR

            mr = DmaBufMR(pd, memory.nbytes, access, dmabuf=descriptor, offset=span.offset)
    finally:
        os.close(descriptor)  # the registration keeps the buffer
    return Registered(mr, span.offset, settle)  # with pyverbs, the memory's addresses start at its offset


def _by_peer_memory(pd: Any, memory: GpuMemory, access: int, settle: Callable[[], None]) -> Registered:
    with _as_os_errors():
        from pyverbs.mr import MR

        mr = MR(pd, memory.nbytes, access, address=memory.address)
    return Registered(mr, memory.address, settle)


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
