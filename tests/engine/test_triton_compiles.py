"""Kernels that tests run in Triton's interpreter compile for GPUs, too. This needs no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: `make test` installs it")

KERNELS = ["add_and_norm", "attend_tiles", "bound_scores", "merge_splits", "place_heads", "score_candidates"]


def compiled(folder: Path, *arguments: str) -> list[str]:
    """Return the kernels that `compile_triton_steps.py` compiles, with Triton's cache in `folder`."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, str(Path(__file__).with_name("compile_triton_steps.py")), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_kernels_of_steps_compile_for_a_gpu(tmp_path: Path) -> None:
    assert compiled(tmp_path, "90", "bf16") == [*KERNELS, "sum_weights"]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", ["80", "89", "90"])
def test_kernels_of_steps_compile_for_all_gpus(capability: str, tmp_path: Path) -> None:
    assert compiled(tmp_path, capability, "fp32", "fp16", "bf16") == [*KERNELS, "sum_weights"]
