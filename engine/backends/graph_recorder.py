"""Recording of work on a device as a graph, whose kernels are launched together: on CUDA by `torch.cuda.CUDAGraph`.

Work that is recorded must be the same whenever it is replayed: it reads its inputs from tensors that stay where they
are, its shapes are fixed, and the host neither waits for the device nor reads from it.
"""

from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

import torch


class RecordedGraph(Protocol):
    """Recorded work."""

    def replay(self) -> torch.Tensor:
        """Queue the work again and return its result, which the next replay of any graph may overwrite."""
        ...


class GraphRecorder(Protocol):
    """Records work as graphs."""

    def record(self, work: Callable[[], torch.Tensor]) -> RecordedGraph:
        """Run the work at least once and record it. Raises `RuntimeError` if it cannot be recorded, of which
        `torch.OutOfMemoryError` is a kind.
        """
        ...


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, result: torch.Tensor) -> None:
        self.graph = graph
        self._result = result

    def replay(self) -> torch.Tensor:
        """Launch the graph on the current stream."""
        self.graph.replay()
        return self._result


class CudaGraphRecorder:
    """Records what one thread queues on one CUDA device; other threads may use the device at the same time.

    Not yet proven on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._recorded = WeakSet[_CudaGraph]()

    def record(self, work: Callable[[], torch.Tensor]) -> RecordedGraph:
        """Record the work on a stream of its own, after it has run there once: kernels are compiled and libraries
        allocate their workspaces at the first run, which a recording does not allow.
        """
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                work()
                # Graphs are replayed one after another and can share the memory between their kernels. The memory
                # belongs to the graphs that use it, and a handle that none uses any more is not valid.
                shared = next(iter(self._recorded), None)
                pool = torch.cuda.graph_pool_handle() if shared is None else shared.graph.pool()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    result = work()
                finally:
                    graph.capture_end()
        finally:
            current.wait_stream(self._stream)
        recorded = _CudaGraph(graph, result)
        self._recorded.add(recorded)
        return recorded
