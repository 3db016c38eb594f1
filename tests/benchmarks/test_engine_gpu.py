"""The benchmark for GPUs runs on a CPU from end to end, and says what it cannot measure."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_whole_script_runs_on_a_cpu() -> None:
    command = [sys.executable, "benchmarks/engine_gpu.py", "--device", "cpu", "--shape", "tiny", "--backend", "torch"]
    command += ["--backend", "flash-attn"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    part = result["backends"]["torch"]
    assert [row["published"]["batch"] for row in part["table"]] == [1, 4]
    assert all(row["prefill_ms"] > 0 and row["decode_ms"] > 0 and row["tokens_per_s"] > 0 for row in part["table"])
    assert list(part["reuse_ttft_ms"]) == ["0%", "50%", "90%", "95%"]
    assert part["interference"]["beside_p50_ms"] > part["interference"]["alone_p50_ms"] > 0
    assert {"decode_ratio", "prefill_ratio"} == set(part["kv_int8_64"]) == set(part["kv_int8_8"]) == set(part["w8a8"])
    assert set(part["w4a16"]) == set(part["w8a8"])
    assert sum(kernel["share"] for kernel in part["kernels"]["kernels"]) <= 1
    assert part["kernels"]["attention_bytes"] == 4 * 80 * 2 * 2 * 2 * 64 * 4  # batch, context, layers, k|v, heads, ...
    assert [row["batch"] for row in result["transformers"]] == [1, 4]
    assert "runs on CUDA" in result["backends"]["flash-attn"]["problem"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_how_to_try_it() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/engine_gpu.py"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "there is no GPU: give --device cpu --shape tiny" in done.stderr
