"""The calls that staging makes of NVIDIA's driver, against a stand-in for its library that moves the bytes at once.

What the real driver does with them is proven on a GPU only (`make gpu-proof`).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from messenger.staging import Ranges, StagingError, merged
from messenger.staging import cuda as cuda_module
from messenger.staging.cuda import CudaRuntime, _Attributes, _CudaStream, _Memcpy2D

NBYTES, STREAM, CONTEXT = 4096, 0xABC, 0xDEF


class Driver:
    """The functions of libcuda that staging calls, as a driver of some version has them."""

    def __init__(self, *functions: str) -> None:
        self.calls: list[str] = []
        self.current: dict[int, int] = {}  # the threads' contexts
        self.locked: dict[int, int] = {}
        self.refused: set[str] = set()
        for name in ("cuMemcpy2DAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", *functions):
            setattr(self, name, self._counted(name))
        self.cuMemHostRegister_v2 = self._counted("lock")
        self.cuMemHostUnregister = self._counted("unlock")

    def _counted(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if self.current.get(threading.get_ident()) != CONTEXT:
                return 201
            self.calls.append(name)
            if name in self.refused:
                return 801
            kind = "move" if "toH" in name or "toD" in name else name.removesuffix("_v2").removesuffix("Async")
            getattr(self, f"_{kind}")(*arguments)
            return 0

        return call

    def cuDeviceGetAttribute(self, found: Any, number: int, device: int) -> int:
        assert (number, device) == (11, 0)
        found._obj.value = 1000
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        assert device == 0
        context._obj.value = CONTEXT
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.current[threading.get_ident()] = context.value
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        context._obj.value = self.current.pop(threading.get_ident())
        return 0

    def cuGetErrorName(self, code: int, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_NOT_SUPPORTED" if code == 801 else None
        return 0

    def _lock(self, address: Any, nbytes: Any, flags: int) -> None:
        assert isinstance(nbytes, ctypes.c_size_t), "an int would be cut to 32 bits"
        self.locked[address.value] = nbytes.value

    def _unlock(self, address: Any) -> None:
        del self.locked[address.value]

    def _move(self, to: Any, source: Any, nbytes: Any, stream: Any) -> None:
        assert stream.value == STREAM
        ctypes.memmove(to.value, source.value, nbytes.value)

    def _cuMemcpy2D(self, one: Any, stream: Any) -> None:
        assert stream.value == STREAM
        it = one._obj
        assert {it.src_type, it.dst_type} == {1, 2}
        source, to = (it.src_host, it.dst_device) if it.src_type == 1 else (it.src_device, it.dst_host)
        for row in range(it.height):
            ctypes.memmove(to + row * it.dst_pitch, source + row * it.src_pitch, it.width)

    def _cuMemcpyBatch(self, *arguments: Any) -> None:
        to, source, sizes, count, attributes, first, num_attributes, *fail_index, stream = arguments
        assert len(fail_index) == (self.calls[-1] == "cuMemcpyBatchAsync")
        assert stream.value == STREAM
        assert (attributes._obj.order, first._obj.value, num_attributes.value) == (1, 0, 1)
        lists = [np.ctypeslib.as_array((ctypes.c_uint64 * count.value).from_address(each.value)) for each in
                 (to, source, sizes)]  # fmt: skip
        for each in zip(*(one.tolist() for one in lists), strict=True):
            ctypes.memmove(*each)


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.zeros(NBYTES, dtype=torch.uint8)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, memory: torch.Tensor) -> Callable[[Driver], CudaRuntime]:
    def new(driver: Driver) -> CudaRuntime:
        monkeypatch.setattr(cuda_module.ctypes, "CDLL", lambda name: driver)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        return CudaRuntime(memory)

    return new


SCATTERED = [0, 3, 5, 6, 10, 11, 12, 20, 22, 31]
STREAM_OF_TORCH = _CudaStream(SimpleNamespace(cuda_stream=STREAM))  # type: ignore[arg-type]
BATCHES = {"none": (), "12.8": ("cuMemcpyBatchAsync",), "13": ("cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2")}


@pytest.mark.parametrize("version", BATCHES)
@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("nbytes", [16, 64])
@pytest.mark.parametrize("slots", [SCATTERED, [4, 5, 6, 7], [1], [3, 9, 15]])
def test_the_driver_is_told_to_move_exactly_the_ranges(
    runtime: Callable[[Driver], CudaRuntime],
    memory: torch.Tensor,
    version: str,
    to_host: bool,
    nbytes: int,
    slots: list[int],
) -> None:
    driver = Driver(*BATCHES[version])
    one, mirror = runtime(driver), np.zeros(NBYTES, np.uint8)
    one.pin(mirror)
    assert driver.locked == {mirror.ctypes.data: NBYTES}
    device = memory.numpy()
    source, target = (device, mirror) if to_host else (mirror, device)
    source[:] = np.random.default_rng(0).integers(1, 256, NBYTES)
    expected = np.zeros(NBYTES, np.uint8)
    for slot in slots:
        expected[slot * 64 : slot * 64 + nbytes] = source[slot * 64 : slot * 64 + nbytes]
    copies = merged([Ranges.same(np.array(slots, np.int64) * 64, nbytes)], one.max_pitch)
    one.copy(STREAM_OF_TORCH, copies, to_host=to_host)
    assert (target == expected).all()
    if slots is SCATTERED and version != "none":
        assert driver.calls[1:] == [BATCHES[version][-1]], "one call"
    else:
        assert len(driver.calls[1:]) == len(copies)
    one.unpin(mirror)
    assert not driver.locked


def test_batches_that_the_driver_refuses_are_done_without(
    runtime: Callable[[Driver], CudaRuntime], memory: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver("cuMemcpyBatchAsync_v2")
    driver.refused.add("cuMemcpyBatchAsync_v2")
    one, mirror = runtime(driver), np.zeros(NBYTES, np.uint8)
    one.pin(mirror)
    memory[:] = 7
    copies = merged([Ranges.same(np.array(SCATTERED, np.int64) * 64, 16)], one.max_pitch)
    for _ in range(2):
        one.copy(STREAM_OF_TORCH, copies, to_host=True)
    assert mirror.sum() == 7 * 16 * len(SCATTERED)
    assert driver.calls.count("cuMemcpyBatchAsync_v2") == 1
    assert "batched copies are not used: cuMemcpyBatchAsync_v2 failed: CUDA_ERROR_NOT_SUPPORTED (801)" in caplog.text


def test_an_error_of_the_driver_is_named(runtime: Callable[[Driver], CudaRuntime]) -> None:
    driver = Driver()
    driver.refused.add("lock")
    with pytest.raises(StagingError, match=r"cuMemHostRegister_v2 failed: CUDA_ERROR_NOT_SUPPORTED \(801\)"):
        runtime(driver).pin(np.zeros(NBYTES, np.uint8))
    del driver.cuMemHostRegister_v2
    with pytest.raises(StagingError, match="too old: it has no cuMemHostRegister_v2"):
        runtime(driver).pin(np.zeros(NBYTES, np.uint8))


def test_a_machine_without_the_driver_is_named(monkeypatch: pytest.MonkeyPatch, memory: torch.Tensor) -> None:
    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda_module.ctypes, "CDLL", fail)
    with pytest.raises(StagingError, match=r"NVIDIA's driver library cannot be loaded: libcuda\.so\.1"):
        CudaRuntime(memory)


def test_kernels_are_launched_on_the_stream_and_not_on_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["compute"]

    @contextlib.contextmanager
    def stream(name: Any) -> Iterator[None]:
        current.append(name)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    launched: list[Any] = []
    _CudaStream("copies").launch(lambda: launched.append(current[-1]))  # type: ignore[arg-type]
    assert (launched, current) == (["copies"], ["compute"])


def test_structures_have_the_layout_of_cuda_h() -> None:
    assert ctypes.sizeof(_Memcpy2D) == 128
    offsets = {name: getattr(_Memcpy2D, name).offset for name in ("src_host", "src_pitch", "dst_type", "dst_pitch")}
    assert offsets == {"src_host": 24, "src_pitch": 48, "dst_type": 72, "dst_pitch": 104}
    assert (_Memcpy2D.width.offset, _Memcpy2D.height.offset) == (112, 120)
    assert (ctypes.sizeof(_Attributes), _Attributes.flags.offset) == (24, 20)
