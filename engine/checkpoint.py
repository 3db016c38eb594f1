"""Reading safetensors checkpoints: which file holds which tensor, integrity before use, contents hashed when read.

Knows nothing of architectures: names and shapes in, tensors out.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointDamaged, ModelNotFound, TensorMismatch, UnsupportedModel

_DTYPES = {"F32", "F16", "BF16"}
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format itself


class Checkpoint:
    """An open checkpoint; every tensor read goes into `digest()`."""

    def __init__(self, folder: Path, files: Mapping[str, Any], where: Mapping[str, str]) -> None:
        self._folder = folder
        self._files = files
        self._where = where
        self._hashes: dict[str, bytes] = {}

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: frozenset[str]) -> None:
        """Compares names and shapes with `expected`; tensors named in `ignored` may be present or not.

        Raises `TensorMismatch` with every difference, `UnsupportedModel` for a dtype that is no plain float.
        """
        found = {name: tuple(self._slice(name).get_shape()) for name in self._where}
        missing = [name for name in expected if name not in found]
        unexpected = [name for name in found if name not in expected and not _is_ignored(name, ignored)]
        wrong = {n: (shape, found[n]) for n, shape in expected.items() if n in found and found[n] != shape}
        if missing or unexpected or wrong:
            raise TensorMismatch(str(self._folder), missing=missing, unexpected=unexpected, wrong_shape=wrong)
        for name in expected:
            if (dtype := self._slice(name).get_dtype()) not in _DTYPES:
                supported = ", ".join(sorted(_DTYPES))
                raise UnsupportedModel(
                    f"{self._folder}: tensor {name} is stored as {dtype} ({supported} are supported)"
                )

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype, on the CPU."""
        tensor: torch.Tensor = self._files[self._where[name]].get_tensor(name)
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

    def _slice(self, name: str) -> Any:
        return self._files[self._where[name]].get_slice(name)


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """Opens model.safetensors, or the shards named in its index."""
    names = _shards(folder)
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        where: dict[str, str] = {}
        for name in names:
            path = folder / name
            _check_length(path)
            try:
                files[name] = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except SafetensorError as error:
                raise CheckpointDamaged(f"{path} is not a well-formed safetensors file: {error}") from error
            where.update(dict.fromkeys(files[name].keys(), name))
        yield Checkpoint(folder, files, where)


def _shards(folder: Path) -> list[str]:
    if (folder / _SINGLE).is_file():
        return [_SINGLE]
    index = folder / _INDEX
    if not index.is_file():
        raise ModelNotFound(f"{folder} has neither {_SINGLE} nor {_INDEX}: no weights in the safetensors format")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointDamaged(f"{index} is not a weight index: {error!r}") from error
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise ModelNotFound(f"{folder} lacks the shards {', '.join(absent)} that {_INDEX} names")
    return names


def _check_length(path: Path) -> None:
    """The file is as long as its header says; told apart here because the cause, a broken download, is common."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if len(prefix) < 8 or length > _MAX_HEADER_BYTES or 8 + length > size:
            raise CheckpointDamaged(f"{path} is truncated or not safetensors: its header does not fit in {size} bytes")
        try:
            header = json.loads(file.read(length))
            entries = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            expected = 8 + length + max(entries, default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise CheckpointDamaged(f"{path} has a malformed safetensors header: {error!r}") from error
    if size != expected:
        kind = "truncated" if size < expected else "longer than its header says"
        raise CheckpointDamaged(f"{path} is {kind}: expected {expected} bytes, found {size}")


def _is_ignored(name: str, ignored: frozenset[str]) -> bool:
    return name in ignored or name.endswith(".rotary_emb.inv_freq")
