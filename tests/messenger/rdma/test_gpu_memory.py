"""GPU memory: which way it is registered, what is said when it cannot be, and the calls that the driver's library gets.

The library here is a stand-in, built by the C compiler, that keeps the real one's interface: it shows that the calls
are made in order and with the right arguments, not that adapters reach GPUs.
"""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messenger.errors import GpuMemoryUnsupported
from messenger.memory import GpuMemory
from messenger.rdma import gpu_memory
from messenger.rdma.gpu_memory import (
    Allocation,
    CudaDriver,
    ExportMethod,
    PageSpan,
    first_that_works,
    has_peer_memory,
    page_span,
    register,
    ways,
)
from messenger.rdma.policy.facts import ANYWHERE
from messenger.rdma.registered import Registered
from messenger.rdma.topology import bound_place
from rpc.errors import InvalidArgument

BASE, SIZE = 0x7F0000200000, 2 << 20
LIBRARY = """
#define _GNU_SOURCE
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
typedef unsigned long long u64;
static int depth, synced, flushed;
int cuInit(unsigned flags) { return %(init)d; }
int cuDeviceGet(int *device, int ordinal) { *device = 10 + ordinal; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 124 ? device == 13 && %(dmabuf)d : attribute == 118 ? %(ordering)d : %(flushes)d;
  return attribute == 117 || attribute == 118 || attribute == 124 ? 0 : 1; }
int cuFlushGPUDirectRDMAWrites(int target, int scope) {
  flushed += target == 0 && scope == 100; return depth == 1 ? 0 : 201; }
int num_flushes(void) { return flushed; }
int cuDeviceGetPCIBusId(char *text, int length, int device) { strncpy(text, "00000000:37:00.0", length); return 0; }
int cuPointerGetAttribute(int *value, int attribute, u64 pointer) { *value = 3; return attribute == 9 ? 0 : 1; }
int cuMemGetAddressRange_v2(u64 *base, size_t *nbytes, u64 pointer) {
  *base = %(base)dULL; *nbytes = %(size)d; return pointer < %(base)dULL ? 1 : 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &depth; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxPushCurrent_v2(void *context) { depth++; return context == &depth ? 0 : 201; }
int cuCtxPopCurrent_v2(void **context) { depth--; return 0; }
int cuPointerSetAttribute(unsigned *value, int attribute, u64 pointer) {
  synced = attribute == 6 && *value == 1; return depth == 1 ? 0 : 201; }
#if %(export)d
int cuMemGetHandleForAddressRange(int *fd, u64 start, size_t nbytes, int type, u64 flags) {
  if (depth != 1 || !synced || type != 1 || flags || start %% 4096 || nbytes %% 4096) return 1;
  *fd = memfd_create("dmabuf", 0);
  return ftruncate(*fd, nbytes);
}
#endif
int num_contexts(void) { return depth; }
"""


@pytest.fixture
def driver(tmp_path: Path) -> Callable[..., CudaDriver]:
    """`driver(init=0, dmabuf=True, export=True, ordering=100, flushes=1)`: with a library whose calls answer so."""

    def build(
        *, init: int = 0, dmabuf: bool = True, export: bool = True, ordering: int = 100, flushes: int = 1
    ) -> CudaDriver:
        source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so"
        values = {"init": init, "dmabuf": dmabuf, "export": export, "ordering": ordering, "flushes": flushes}
        values |= {"base": BASE, "size": SIZE}
        source.write_text(LIBRARY % values)
        subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", str(library), str(source)], check=True)
        return CudaDriver(str(library))

    return build


@pytest.mark.parametrize(
    ("dmabuf", "peer", "expected"),
    [
        (True, True, (ExportMethod.DMABUF, ExportMethod.PEER_MEMORY)),
        (True, False, (ExportMethod.DMABUF,)),
        (False, True, (ExportMethod.PEER_MEMORY,)),
    ],
)
def test_dmabuf_is_tried_before_peer_memory(dmabuf: bool, peer: bool, expected: tuple[ExportMethod, ...]) -> None:
    assert ways(dmabuf, peer) == expected


def test_without_a_way_what_is_missing_is_named() -> None:
    with pytest.raises(GpuMemoryUnsupported, match=r"open kernel modules.*modprobe nvidia-peermem"):
        ways(False, False)


@pytest.mark.parametrize("module", ["nvidia_peermem", "nv_peer_mem"])
def test_the_peer_memory_module_is_found_under_both_names(tmp_path: Path, module: str) -> None:
    assert not has_peer_memory(tmp_path)
    (tmp_path / "sys/module" / module).mkdir(parents=True)
    assert has_peer_memory(tmp_path)


def test_memory_is_exported_in_whole_pages() -> None:
    assert page_span(GpuMemory(0x7F0000201200, 100), 4096) == PageSpan(0x7F0000201000, 4096, 0x200)
    assert page_span(GpuMemory(0x7F0000201000, 4096), 4096) == PageSpan(0x7F0000201000, 4096, 0)


@given(st.integers(1, 1 << 47), st.integers(1, 1 << 36), st.sampled_from([4096, 16384, 65536]))
def test_pages_cover_the_memory_and_no_page_more(address: int, nbytes: int, page: int) -> None:
    span = page_span(GpuMemory(address, nbytes), page)
    assert span.start % page == span.nbytes % page == 0
    assert span.start + span.offset == address
    assert 0 <= span.offset < page
    assert 0 <= span.nbytes - span.offset - nbytes < page


def test_a_way_that_fails_gives_place_to_the_next() -> None:
    def fails() -> list[Registered]:
        raise OSError(95, "Operation not supported")

    works = [Registered(object(), 5)]
    assert first_that_works({ExportMethod.DMABUF: fails, ExportMethod.PEER_MEMORY: lambda: works}) == (
        ExportMethod.PEER_MEMORY,
        works,
    )
    with pytest.raises(GpuMemoryUnsupported, match=r"by dmabuf: .*not supported; by peer memory: .*not supported"):
        first_that_works({ExportMethod.DMABUF: fails, ExportMethod.PEER_MEMORY: fails})


def test_a_machine_without_the_driver_says_what_to_install() -> None:
    with pytest.raises(GpuMemoryUnsupported, match="user-space part of NVIDIA's driver"):
        CudaDriver("libcuda-that-is-not-there.so.1")


def test_a_driver_in_trouble_is_quoted(driver: Callable[..., CudaDriver]) -> None:
    with pytest.raises(GpuMemoryUnsupported, match="cuInit failed with CUDA error 803"):
        driver(init=803)


def test_a_driver_too_old_to_export_is_named(driver: Callable[..., CudaDriver]) -> None:
    with pytest.raises(GpuMemoryUnsupported, match="too old: it has no cuMemGetHandleForAddressRange"):
        driver(export=False).export(PageSpan(BASE, 4096, 0), 3)


def test_memory_is_exported_in_the_gpus_own_context(driver: Callable[..., CudaDriver]) -> None:
    cuda, memory = driver(), GpuMemory(BASE + 100, 5000)
    assert cuda.allocation(memory) == Allocation(BASE, SIZE, gpu=3)
    assert cuda.exports_dmabuf(3)
    cuda.keep_in_order(memory, 3)
    descriptor = cuda.export(page_span(memory), 3)
    try:
        assert os.fstat(descriptor).st_size == 8192
    finally:
        os.close(descriptor)
    assert cuda._cuda.num_contexts() == 0


def test_a_gpus_place_is_that_of_its_pci_address(driver: Callable[..., CudaDriver], eight_by_eight: Any) -> None:
    place = driver().place(3, eight_by_eight.root)
    assert (place.pci_path[-1], place.numa_node) == ("0000:37:00.0", 0)


def test_adapters_are_sought_near_the_gpu_that_is_named(
    driver: Callable[..., CudaDriver], eight_by_eight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = driver()
    monkeypatch.setattr(gpu_memory, "CudaDriver", lambda: cuda)
    assert gpu_memory.place_of(3, eight_by_eight.root) == cuda.place(3, eight_by_eight.root) != ANYWHERE


def test_without_the_driver_adapters_are_sought_as_though_no_gpu_was_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpu_memory, "CudaDriver", lambda: CudaDriver("libcuda-that-is-not-there.so.1"))
    assert gpu_memory.place_of(3) == bound_place()
    assert "not chosen by their distance to GPU 3: libcuda-that-is-not-there.so.1 cannot be loaded" in caplog.text


def test_memory_that_reaches_beyond_its_allocation_is_refused(driver: Callable[..., CudaDriver]) -> None:
    with pytest.raises(GpuMemoryUnsupported, match="reach beyond their allocation"):
        driver().allocation(GpuMemory(BASE + SIZE - 100, 200))


def test_a_registration_that_no_way_serves_leaves_no_descriptor(driver: Callable[..., CudaDriver]) -> None:
    """There is no protection domain here, and maybe no pyverbs: both ways fail, and everything is given back."""
    cuda = driver()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises((GpuMemoryUnsupported, TypeError)) as raised:
        register([None], GpuMemory(BASE, 4096), 1, driver=cuda, peer_memory=True)
    assert set(os.listdir("/proc/self/fd")) == before
    if isinstance(raised.value, GpuMemoryUnsupported):
        assert re.search(r"by dmabuf: .*by peer memory: ", str(raised.value))


def test_memory_that_no_way_reaches_is_refused_before_anything_is_exported(driver: Callable[..., CudaDriver]) -> None:
    with pytest.raises(GpuMemoryUnsupported, match="exports no dmabuf"):
        register([None], GpuMemory(BASE, 4096), 1, driver=driver(dmabuf=False), peer_memory=False)


def test_a_gpu_that_keeps_adapters_writes_in_order_is_not_made_to_wait(driver: Callable[..., CudaDriver]) -> None:
    assert not driver(ordering=100).needs_flush(3)


def test_a_gpu_that_does_not_is_made_to_wait_in_its_own_context(driver: Callable[..., CudaDriver]) -> None:
    cuda = driver(ordering=0)
    assert cuda.needs_flush(3)
    cuda.flush(3)
    assert (cuda._cuda.num_flushes(), cuda._cuda.num_contexts()) == (1, 0)


def test_a_gpu_that_can_neither_is_refused(driver: Callable[..., CudaDriver]) -> None:
    with pytest.raises(GpuMemoryUnsupported, match="does not keep adapters' writes in order"):
        driver(ordering=0, flushes=0).needs_flush(3)


@pytest.mark.parametrize(("address", "nbytes"), [(0, 4096), (BASE, 0), (BASE, -1)])
def test_memory_that_can_be_none_is_refused(address: int, nbytes: int) -> None:
    with pytest.raises(InvalidArgument, match="GPU memory needs a device pointer and a positive size"):
        GpuMemory(address, nbytes)
