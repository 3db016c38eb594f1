"""What an engine computes on, in words: so that costs measured on one machine are not taken for another's."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch

__all__ = ["hardware_name"]


def hardware_name(device: torch.device, threads: int) -> str:
    """A GPU's name, or the CPU's and how many threads compute on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {threads} thread{'s' if threads != 1 else ''}"


@cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found and found[0] else platform.processor() or platform.machine() or "unknown CPU"
