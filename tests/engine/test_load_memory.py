"""Loading takes the memory of the weights and of about one tensor, and leaves nothing that refers to the files."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine import load_model
from engine.random_model import RandomModelSpec, write_random_model

MIB = 1 << 20
SPEC = RandomModelSpec(layers=6, hidden=512, heads=8, kv_heads=4, intermediate=1536, vocab=16000)
_MEASURE = """
import re, sys
from dataclasses import fields
from pathlib import Path
import torch
from engine import load_model

def status(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

small, folder, dtype = sys.argv[1:]
load_model(small, dtype=dtype, backend="torch", threads=1)  # what the first one needs for good
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
model = load_model(folder, dtype=dtype, backend="torch", threads=1)
values = [getattr(model._weights, field.name) for field in fields(model._weights)]
tensors = [value for value in values if isinstance(value, torch.Tensor)]
print(sum({each.data_ptr(): each.nbytes for each in tensors}.values()), status("VmHWM") - before)
"""


@pytest.mark.parametrize(("spec", "dtype"), [(SPEC, "float32"), (SPEC, "bfloat16")])
def test_loading_needs_room_for_one_tensor_more(tmp_path: Path, spec: RandomModelSpec, dtype: str) -> None:
    folder = write_random_model(tmp_path / "model", spec)
    small = write_random_model(tmp_path / "small", RandomModelSpec())
    command = [sys.executable, "-c", _MEASURE, str(small), str(folder), dtype]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    final, peak = map(int, ended.stdout.split())
    largest = spec.vocab * spec.hidden * 4
    assert (folder / "model.safetensors").stat().st_size > 3 * largest, "the bound would not notice a mapped file"
    assert peak < final + largest + 12 * MIB


def test_a_loaded_model_does_not_change_with_its_files(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", RandomModelSpec(tied=False))
    copy = shutil.copytree(folder, tmp_path / "copy")
    ids = np.arange(9, dtype=np.int32)
    model = load_model(folder)
    before = model.score(ids)
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(path.stat().st_size // 2))
    assert np.array_equal(model.score(ids), before)
    assert np.array_equal(load_model(copy).score(ids), before)
    assert not np.array_equal(load_model(folder).score(ids), before)
