"""The CUDA runtime behind staging: torch's streams and events, and copies by the driver's API.

NOT YET RUN ON A GPU: written to the documented interfaces; `make gpu-proof` runs it where there is a GPU.

torch's own copies are not used: between two strided tensors on different devices torch makes contiguous temporaries,
and blocks. The driver is called instead, on torch's streams: cuMemcpyBatchAsync (driver 12.8 or newer) for many pieces,
cuMemcpy2DAsync for few and for older drivers.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from messenger.staging.copies import StridedCopy
from messenger.staging.runtime import DeviceEvent, DeviceStream
from messenger.staging.ticket import StagingError

_HOST, _DEVICE = 1, 2  # CUmemorytype
_IN_STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_MAX_PITCH: Final = 11  # CU_DEVICE_ATTRIBUTE_MAX_PITCH
_PORTABLE: Final = 1  # CU_MEMHOSTREGISTER_PORTABLE
_FEW: Final = 4  # up to this number of strided copies, one call each is as fast as a batch

_log = logging.getLogger(__name__)


class _Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D_v2."""

    _fields_ = (
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. The locations are hints for managed memory, which is not used here."""

    _fields_ = (("order", ctypes.c_int), ("src", _Location), ("dst", _Location), ("flags", ctypes.c_uint))


class _CudaEvent:
    """DeviceEvent of a CUDA stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self.event.synchronize()


class _CudaStream:
    """DeviceStream over one of torch's."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def record(self) -> DeviceEvent:
        # A waiting thread sleeps.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return _CudaEvent(event)

    def wait(self, event: DeviceEvent) -> None:
        assert isinstance(event, _CudaEvent)
        self.stream.wait_event(event.event)

    def launch(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self.stream):
            work()


class CudaRuntime:
    """DeviceRuntime of one CUDA device."""

    def __init__(
        self, memory: torch.Tensor, compute: Callable[[], torch.cuda.Stream] | None = None, *, batches: bool = True
    ) -> None:
        """`memory`: uint8 on the device; offsets in copies count from its first byte.

        `compute` returns the stream on which the engine computes, by default the device's default stream. Without
        `batches`, cuMemcpyBatchAsync is not used. Raises StagingError if the driver cannot be used.
        """
        self._memory = memory
        self._base = memory.data_ptr()
        self._device = memory.device
        self._compute = compute or (lambda: torch.cuda.default_stream(self._device))
        self._mirror_base = 0
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise StagingError(f"NVIDIA's driver library cannot be loaded: {error}") from error
        torch.cuda.synchronize(self._device)  # initialises the driver; no engine runs yet
        pitch, number, context = ctypes.c_int(), self._device.index or 0, ctypes.c_void_p()
        self._call("cuDeviceGetAttribute", ctypes.byref(pitch), _MAX_PITCH, number)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)  # the context that torch uses
        self._context = context
        self.max_pitch = pitch.value
        self._batch = self._batch_function() if batches else None

    @property
    def has_batches(self) -> bool:
        """True if many pieces are copied in one call."""
        return self._batch is not None

    @property
    def compute(self) -> DeviceStream:
        return _CudaStream(self._compute())

    def new_stream(self) -> DeviceStream:
        return _CudaStream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    def pin(self, mirror: NDArray[np.uint8]) -> None:
        self._mirror_base = int(mirror.ctypes.data)
        with self._in_context():
            self._call(
                "cuMemHostRegister_v2", ctypes.c_void_p(self._mirror_base), ctypes.c_size_t(mirror.nbytes), _PORTABLE
            )

    def unpin(self, mirror: NDArray[np.uint8]) -> None:
        with self._in_context():
            self._call("cuMemHostUnregister", ctypes.c_void_p(int(mirror.ctypes.data)))

    def copy(self, stream: DeviceStream, copies: Sequence[StridedCopy], *, to_host: bool) -> None:
        assert isinstance(stream, _CudaStream)
        handle = ctypes.c_void_p(stream.stream.cuda_stream)
        with self._in_context():
            if self._batch is not None and len(copies) > _FEW:
                try:
                    self._copy_batch(self._batch, handle, copies, to_host=to_host)
                    return
                except StagingError as error:  # the driver has the function, but not for this device
                    _log.warning("batched copies are not used: %s", error)
                    self._batch = None
            for each in copies:
                self._copy_2d(handle, each, to_host=to_host)

    @contextlib.contextmanager
    def _in_context(self) -> Iterator[None]:
        """Make the device's context the calling thread's, which may have none; torch sets it only when it must."""
        popped = ctypes.c_void_p()
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(popped))

    def _copy_2d(self, stream: ctypes.c_void_p, each: StridedCopy, *, to_host: bool) -> None:
        one = _Memcpy2D(width=each.nbytes, height=each.rows)
        host, device = self._mirror_base + each.host, self._base + each.device
        if to_host:
            one.src_type, one.src_device, one.src_pitch = _DEVICE, device, each.device_pitch
            one.dst_type, one.dst_host, one.dst_pitch = _HOST, host, each.host_pitch
        else:
            one.src_type, one.src_host, one.src_pitch = _HOST, host, each.host_pitch
            one.dst_type, one.dst_device, one.dst_pitch = _DEVICE, device, each.device_pitch
        if each.rows == 1:  # a single row may be longer than the largest pitch
            to, source = (host, device) if to_host else (device, host)
            name = "cuMemcpyDtoHAsync_v2" if to_host else "cuMemcpyHtoDAsync_v2"
            self._call(name, ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(each.nbytes), stream)
            return
        self._call("cuMemcpy2DAsync_v2", ctypes.byref(one), stream)

    def _copy_batch(
        self, batch: Callable[..., None], stream: ctypes.c_void_p, copies: Sequence[StridedCopy], *, to_host: bool
    ) -> None:
        rows = np.array([row for each in copies for row in each.each_row()], np.uint64)
        host, device = rows[:, 0] + np.uint64(self._mirror_base), rows[:, 1] + np.uint64(self._base)
        sizes = np.repeat([each.nbytes for each in copies], [each.rows for each in copies]).astype(np.uint64)
        batch(*((host, device) if to_host else (device, host)), sizes, stream)

    def _batch_function(self) -> Callable[..., None] | None:
        """Return the driver's batched copy as f(destinations, sources, sizes, stream); None if it has none."""
        attributes, first = _Attributes(order=_IN_STREAM_ORDER), ctypes.c_size_t(0)
        # CUDA 13 dropped the parameter for the index of the failed copy.
        fail_index: dict[str, tuple[Any, ...]] = {
            "cuMemcpyBatchAsync_v2": (),
            "cuMemcpyBatchAsync": (ctypes.byref(ctypes.c_size_t()),),
        }
        name = next((name for name in fail_index if hasattr(self._driver, name)), None)
        if name is None:
            _log.info("NVIDIA's driver has no batched copies (they need 12.8): copies are queued one by one")
            return None

        def batch(
            to: NDArray[np.uint64], source: NDArray[np.uint64], sizes: NDArray[np.uint64], stream: ctypes.c_void_p
        ) -> None:
            arrays = (np.ascontiguousarray(each) for each in (to, source, sizes))
            kept = [*arrays]
            pointers = (ctypes.c_void_p(each.ctypes.data) for each in kept)
            self._call(
                name, *pointers, ctypes.c_size_t(len(to)), ctypes.byref(attributes), ctypes.byref(first),
                ctypes.c_size_t(1), *fail_index[name], stream,
            )  # fmt: skip

        return batch

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._driver, name)
        except AttributeError:
            raise StagingError(f"NVIDIA's driver is too old: it has no {name}") from None
        code = function(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(text))
            raise StagingError(f"{name} failed: {(text.value or b'unknown error').decode()} ({code})")
