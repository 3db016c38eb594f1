"""Checks of the installation: Python, required and optional packages, compiled kernels, the bundled model."""

import hashlib
import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moonpool.doctor.checks import Check, Level, Needs, Purpose, Verdict, optional
from moonpool.kernel_compilation import CompiledKernels, observe_kernels
from settings.worker import BUNDLED_MODEL

LEAST_PYTHON: Final = (3, 11)
SUMS_NAME: Final = "SHA256SUMS"
_ROOT: Final = Path(__file__).resolve().parents[2]
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)\s*(?:>=\s*([0-9.]+))?\s*(?:;\s*(.*))?$")


@dataclass(frozen=True)
class Python:
    version: tuple[int, ...]
    platform: str  # sys.platform
    is_virtual: bool


def observe_python() -> Python:
    return Python(sys.version_info[:3], sys.platform, sys.prefix != sys.base_prefix)


def judge_python(seen: Python, needs: Needs) -> Verdict:
    version = ".".join(map(str, seen.version))
    found = f"{version} on {seen.platform}{', in a virtual environment' if seen.is_virtual else ''}"
    if seen.version < LEAST_PYTHON:
        least = ".".join(map(str, LEAST_PYTHON))
        return Level.FAIL, found, f"Install Python {least} or newer, and recreate the environment with it."
    if not seen.platform.startswith("linux"):
        return Level.FAIL, found, "Serve on Linux: shared memory and the supervision of processes need it."
    return Level.OK, found, ""


@dataclass(frozen=True)
class Package:
    """A distribution; `version` is "" if it is not installed."""

    name: str
    version: str
    least: str = ""


def observe_packages() -> tuple[Package, ...]:
    """Return the requirements of this installation, without extras. Imports none of them."""
    needed = importlib.metadata.requires("moonpool") or []
    parsed = [found for line in needed if (found := _REQUIREMENT.match(line))]
    return tuple(
        Package(name, _version(name), least or "")
        for name, least, marker in (found.groups() for found in parsed)
        if "extra" not in (marker or "")
    )


def judge_packages(seen: tuple[Package, ...], needs: Needs) -> Verdict:
    missing = [package.name for package in seen if not package.version]
    old = [
        f"{package.name} {package.version} (needs {package.least})"
        for package in seen
        if package.version and is_older(package.version, package.least)
    ]
    main = ", ".join(f"{package.name} {package.version}" for package in seen if package.name in ("torch", "numba"))
    if missing or old:
        return Level.FAIL, f"missing or too old: {', '.join([*missing, *old])}", "Reinstall: pip install moonpool."
    return Level.OK, f"all {len(seen)} are installed: {main}", ""


def is_older(version: str, least: str) -> bool:
    """Compare the leading numbers of two versions: "2.13.0+cpu" is not older than "2.6"."""
    numbers = [[int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3]] for text in (version, least)]
    length = max(map(len, numbers))
    mine, wanted = ([*each, *[0] * (length - len(each))] for each in numbers)
    return mine < wanted


@dataclass(frozen=True)
class Extra:
    """An optional package."""

    name: str
    module: str
    what_for: str
    purposes: tuple[Purpose, ...] = ()


EXTRAS: Final = (Extra("ray", "ray", "run a cluster on Ray"),)


def observe_extra(extra: Extra) -> Package:
    is_installed = importlib.util.find_spec(extra.module) is not None
    return Package(extra.name, (_version(extra.name) or "of unknown version") if is_installed else "")


def judge_extra(seen: Package, needs: Needs, extra: Extra) -> Verdict:
    if seen.version:
        return Level.OK, seen.version, ""
    advice = f"Needed only to {extra.what_for}: pip install {extra.name}."
    return optional(needs, *extra.purposes), "not installed", advice


def judge_kernels(seen: CompiledKernels, needs: Needs) -> Verdict:
    found = f"{seen.num_compiled} of {seen.num_modules} modules are compiled"
    if seen.num_compiled == seen.num_modules:
        return Level.OK, found, ""
    if not seen.is_writable:
        advice = "Set NUMBA_CACHE_DIR to a writable folder: otherwise each process compiles the kernels again."
        return Level.WARN, f"{found}; the cache is not writable", advice
    return Level.NOTE, found, "The first start compiles and caches the others, which takes about a minute."


@dataclass(frozen=True)
class BundledModel:
    """Comparison of the bundled model's files with their recorded hashes."""

    is_there: bool
    num_recorded: int
    damaged: tuple[str, ...]  # missing or different


def observe_model(folder: Path = BUNDLED_MODEL) -> BundledModel:
    sums = folder / SUMS_NAME
    recorded = [line.split(maxsplit=1) for line in sums.read_text().splitlines()] if sums.is_file() else []
    damaged = [name for expected, name in recorded if _sha256(folder / name) != expected]
    return BundledModel(folder.is_dir(), len(recorded), tuple(damaged))


def judge_model(seen: BundledModel, needs: Needs) -> Verdict:
    if not seen.is_there or seen.damaged:
        found = f"damaged: {', '.join(seen.damaged)}" if seen.is_there else "not installed"
        advice = "Reinstall (pip install --force-reinstall moonpool), or serve another model folder."
        return Level.FAIL, found, advice
    if not seen.num_recorded:
        return Level.WARN, f"installed without {SUMS_NAME}, so its integrity is unknown", "Reinstall moonpool."
    return Level.OK, f"intact ({seen.num_recorded} files)", ""


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _extra_check(extra: Extra) -> Check:
    return Check(extra.name, lambda: observe_extra(extra), lambda seen, needs: judge_extra(seen, needs, extra))


CHECKS: Final = (
    Check("python", observe_python, judge_python),
    Check("packages", observe_packages, judge_packages),
    Check("compiled kernels", observe_kernels, judge_kernels),
    Check("bundled model", observe_model, judge_model),
)
EXTRA_CHECKS: Final = tuple(_extra_check(extra) for extra in EXTRAS)
