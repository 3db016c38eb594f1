"""Checks of NVIDIA GPUs: the driver, peer access between GPUs, and torch's CUDA support.

The driver's library and torch are loaded in child processes, since a faulty driver can hang or kill its caller.
"""

import importlib.metadata
import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moonpool.cluster_view.formatting import size_text
from moonpool.doctor.checks import Check, Level, Needs, Purpose, Verdict, optional, read_text, run_script

_ASK_S: Final = 3.5
_DRIVER_SCRIPT: Final = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        raise SystemExit(f"{name} fails with CUDA error {code}")
def number(name, *arguments):
    value = ctypes.c_int()
    call(name, ctypes.byref(value), *arguments)
    return value.value
call("cuInit", 0)
gpus = []
devices = [number("cuDeviceGet", index) for index in range(number("cuDeviceGetCount"))]
for device in devices:
    name, nbytes = ctypes.create_string_buffer(128), ctypes.c_size_t()
    call("cuDeviceGetName", name, 128, device)
    call("cuDeviceTotalMem_v2", ctypes.byref(nbytes), device)
    gpus.append([name.value.decode(), nbytes.value])
pairs = [[one, other] for index, one in enumerate(devices) for other in devices[:index]]
p2p = [pair for pair in pairs if number("cuDeviceCanAccessPeer", *pair)]
print(json.dumps({"cuda": number("cuDriverGetVersion"), "gpus": gpus, "pairs": len(pairs), "p2p": len(p2p)}))
"""
_TORCH_SCRIPT: Final = (
    "import json, torch; print(json.dumps([torch.cuda.is_available(), torch.cuda.device_count(), torch.version.cuda]))"
)


@dataclass(frozen=True)
class Gpu:
    name: str
    nbytes: int


@dataclass(frozen=True)
class Driver:
    """State of the driver. `has_device`: the kernel shows an NVIDIA device; `problem`: why the library is unusable."""

    has_device: bool
    version: str = ""  # of the kernel module
    cuda: int = 0  # newest CUDA version it supports: 12040 is 12.4
    gpus: tuple[Gpu, ...] = ()
    num_pairs: int = 0
    num_p2p_pairs: int = 0  # of them, with direct access to each other's memory
    problem: str = ""


def observe_driver() -> Driver:
    has_device = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/proc/driver/nvidia/version").is_file()
    if not has_device:
        return Driver(False)
    match = re.search(r"Module(?: for \w+)?\s+([\d.]+)", read_text(Path("/proc/driver/nvidia/version")))
    return ask_driver(match.group(1) if match else "")


def ask_driver(version: str) -> Driver:
    """Query the driver's library about its GPUs; `version` is the kernel module's."""
    answer, problem = _ask(_DRIVER_SCRIPT)
    if answer is None:
        return Driver(True, version, problem=problem)
    gpus = tuple(Gpu(str(name), int(nbytes)) for name, nbytes in answer["gpus"])
    return Driver(True, version, answer["cuda"], gpus, answer["pairs"], answer["p2p"])


def judge_driver(seen: Driver, needs: Needs) -> Verdict:
    if not seen.has_device:
        advice = "Serving on the CPU needs none. To give a container GPUs, start it with docker run --gpus all."
        return optional(needs, Purpose.GPU), "no NVIDIA GPU found", advice
    if seen.problem or not seen.gpus:
        advice = "Install the driver's user-space libraries in the same version, or serve with --device cpu."
        level = Level.FAIL if Purpose.GPU in needs else Level.WARN
        return level, f"driver {seen.version}: {seen.problem or 'it reports no GPU'}", advice
    names = ", ".join(f"{gpu.name} ({size_text(gpu.nbytes)})" for gpu in seen.gpus)
    supports = f"{seen.cuda // 1000}.{seen.cuda % 1000 // 10}"
    return Level.OK, f"{names}; driver {seen.version}, CUDA up to {supports}", ""


def judge_p2p(seen: Driver, needs: Needs) -> Verdict:
    if len(seen.gpus) < 2:
        return Level.OK, "needs two GPUs", ""
    found = f"{seen.num_p2p_pairs} of {seen.num_pairs} GPU pairs have peer access"
    if seen.num_p2p_pairs < seen.num_pairs:
        advice = "KV moves through host memory, which always works. For direct access check NVLink, ACS and IOMMU."
        return Level.NOTE, found, advice
    return Level.OK, found, ""


@dataclass(frozen=True)
class Torch:
    """torch and its GPUs. `cuda` is "" for a build without CUDA; `num_gpus` is None if unknown."""

    version: str
    cuda: str
    has_device: bool
    num_gpus: int | None
    problem: str = ""


def observe_torch() -> Torch:
    """Read torch's version, and count its GPUs if the machine has any: importing torch takes seconds."""
    version = importlib.metadata.version("torch")
    spec = importlib.util.find_spec("torch")
    text = read_text(Path(spec.origin).with_name("version.py")) if spec is not None and spec.origin else ""
    match = re.search(r"^cuda\b[^=\n]*=\s*'([\d.]+)'", text, re.MULTILINE)
    cuda = match.group(1) if match else ""
    has_device = any(Path("/dev").glob("nvidia[0-9]*"))
    if not has_device or not cuda:
        return Torch(version, cuda, has_device, None)
    answer, problem = _ask(_TORCH_SCRIPT)
    return Torch(version, cuda, has_device, int(answer[1]) if answer is not None else None, problem)


def judge_torch(seen: Torch, needs: Needs) -> Verdict:
    built = f"built for CUDA {seen.cuda}" if seen.cuda else "built without CUDA"
    found = f"torch {seen.version}, {built}"
    needed = Purpose.GPU in needs
    if not seen.cuda:
        advice = "To use GPUs, install a CUDA build of torch: pip install torch from PyPI's own index."
        if not (needed or seen.has_device):
            return Level.OK, found, ""
        return (Level.FAIL if needed else Level.WARN), found, advice
    if not seen.has_device:
        return Level.OK, found, ""
    if seen.num_gpus is None:
        advice = "Try again on an idle machine, or run: python -c 'import torch; torch.cuda.init()'."
        return Level.WARN, f"{found}; {seen.problem}", advice
    if seen.num_gpus == 0:
        level = Level.FAIL if needed else Level.WARN
        return level, f"{found}; it finds no GPU", "Install a torch built for a CUDA version that the driver supports."
    return Level.OK, f"{found}; it finds {seen.num_gpus} GPUs", ""


def _ask(script: str) -> tuple[Any, str]:
    """Run a Python script in a child process; return (its JSON output, "") or (None, the error)."""
    output, problem = run_script(script, _ASK_S)
    if problem:
        return None, problem
    try:
        return json.loads(output), ""
    except ValueError:
        return None, f"unexpected output: {output[:80]!r}"


CHECKS: Final = (
    Check("GPU", observe_driver, judge_driver),
    Check("GPU peer access", observe_driver, judge_p2p),
    Check("torch", observe_torch, judge_torch),
)
