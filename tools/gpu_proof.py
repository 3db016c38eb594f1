"""Proof on a GPU of everything that is written for GPUs: `python -m tools.gpu_proof [PYTEST ARGUMENT...]`.

Runs the tests marked `gpu`, and those of the engine's backends, which otherwise run on CPUs, in at most ten minutes,
and then `benchmarks/engine_gpu.py`, in as many. Writes their outcome to out/gpu-proof.xml and out/engine-gpu.json. What
needs an RDMA adapter or vLLM too is skipped without it, and the reason is printed.

Exit status: 0 all tests passed, and the engine was measured; 1 one of these failed or was not finished in time; 3 there
is no GPU, and nothing was run.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/gpu",
    "tests/engine/test_parity.py",
    "tests/engine/test_triton_attention.py",
    "tests/engine/test_triton_linear.py",
    "tests/engine/test_triton_rows.py",
    "tests/engine/test_decode_graphs.py",
    "tests/engine/test_device_sampling.py",
)
TIME_LIMIT_S = 600
FAILED, NO_GPU = 1, 3


def missing_gpu() -> str:
    """Return why tests on a GPU cannot run; empty if they can."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA: run `make setup` without TORCH_INDEX"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device: check `nvidia-smi` and `moonpool doctor --for gpu`"
    return ""


def main(arguments: list[str]) -> int:
    """Run the tests and return the exit status."""
    missing = missing_gpu()
    if missing:
        print(f"gpu-proof: NOTHING WAS RUN, and nothing is proven: {missing}", file=sys.stderr)
        return NO_GPU
    import torch

    print(
        f"gpu-proof: {torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}", flush=True
    )
    report = ROOT / "out" / "gpu-proof.xml"
    report.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "not nightly", "-v", *TESTS, f"--junitxml={report}", *arguments]
    try:
        status = subprocess.run(command, cwd=ROOT, timeout=TIME_LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        print(f"gpu-proof: FAILED: not finished within {TIME_LIMIT_S} s", file=sys.stderr)
        return FAILED
    print(f"gpu-proof: {'passed' if status == 0 else 'FAILED'}; outcome of each test: {report}", file=sys.stderr)
    return _measure() or (FAILED if status else 0)


def _measure() -> int:
    """Measure the engine on the GPU into out/engine-gpu.json; return FAILED if that fails."""
    command = [sys.executable, "benchmarks/engine_gpu.py"]
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=TIME_LIMIT_S, stdout=subprocess.PIPE, text=True)
    except subprocess.TimeoutExpired:
        print(f"gpu-proof: FAILED: the engine was not measured within {TIME_LIMIT_S} s", file=sys.stderr)
        return FAILED
    if done.returncode:
        print("gpu-proof: FAILED: benchmarks/engine_gpu.py ended with an error", file=sys.stderr)
        return FAILED
    result = ROOT / "out" / "engine-gpu.json"
    result.write_text(done.stdout.splitlines()[-1] + "\n", encoding="utf-8")
    print(f"gpu-proof: the engine was measured: {result}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
