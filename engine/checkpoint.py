"""Reading safetensors checkpoints: integrity before use, contents hashed when read.

Knows nothing of architectures: names and shapes in, tensors out.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointDamaged
from engine.folder import StoredTensor


class Checkpoint:
    """An open checkpoint; every tensor read goes into `digest()`."""

    def __init__(self, files: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
        self._files = files
        self._tensors = tensors
        self._hashes: dict[str, bytes] = {}

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype, on the CPU."""
        tensor: torch.Tensor = self._files[self._tensors[name].file].get_tensor(name)
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        header = f"{name}:{tensor.dtype}:{list(tensor.shape)}".encode()
        self._hashes[name] = blake3(header).update(raw.numpy().data).digest()
        return tensor

    def digest(self) -> bytes:
        """32 bytes over names, dtypes, shapes and contents of all tensors read; independent of sharding."""
        total = blake3()
        for name in sorted(self._hashes):
            total.update(self._hashes[name])
        return total.digest()


@contextmanager
def open_checkpoint(folder: Path, tensors: Mapping[str, StoredTensor]) -> Iterator[Checkpoint]:
    """Opens the files in which the `tensors`, as `stored_tensors` gave them, lie."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for name in sorted({tensor.file for tensor in tensors.values()}):
            try:
                files[name] = stack.enter_context(safe_open(folder / name, framework="pt", device="cpu"))
            except SafetensorError as error:
                raise CheckpointDamaged(f"{folder / name} is not a well-formed safetensors file: {error}") from error
        yield Checkpoint(files, tensors)
