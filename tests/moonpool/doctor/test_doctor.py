"""The doctor: verdicts on observations of all kinds of machines, and the command on this one."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool import kernel_compilation
from moonpool.doctor import gpu, machine, network, software, storage
from moonpool.doctor.checks import Check, CheckResult, Level, Needs, Purpose, Verdict, examine
from moonpool.doctor.command import DoctorOptions, all_checks

ROOT = Path(__file__).parents[3]
GIB = 1 << 30
NOTHING: Needs = frozenset()
OK, NOTE, WARN, FAIL = Level.OK, Level.NOTE, Level.WARN, Level.FAIL

GOOD_MEMORY = machine.Memory(total=64 * GIB, available=32 * GIB, limit=0, used=0, swap_used=0)
H100 = gpu.Gpu("NVIDIA H100", 80 * GIB)
DRIVER = gpu.Driver(True, "570.86", 12080, (H100, H100), 1, 1)
TORCH = gpu.Torch("2.13.0+cu128", "12.8", True, 2)
FOLDER = storage.Folder("/tmp", 100 * GIB, 50 * GIB, "ext4")
SSD = storage.SsdFolder("/ssd", "xfs", 800 * GIB, True, 0.0004)


@pytest.mark.parametrize(
    ("judge", "seen", "needs", "level", "said"),
    [
        (software.judge_python, software.Python((3, 12, 1), "linux", True), (), OK, "3.12.1"),
        (software.judge_python, software.Python((3, 10, 9), "linux", True), (), FAIL, "Python 3.11 or newer"),
        (software.judge_python, software.Python((3, 12, 1), "darwin", True), (), FAIL, "on Linux"),
        (software.judge_packages, (software.Package("numba", "0.61.2", "0.61"),), (), OK, "all 1 are installed"),
        (software.judge_packages, (software.Package("numba", "", "0.61"),), (), FAIL, "too old: numba"),
        (software.judge_packages, (software.Package("numba", "0.60", "0.61"),), (), FAIL, "numba 0.60 (needs 0.61)"),
        (software.judge_kernels, kernel_compilation.CompiledKernels(5, 5, False), (), OK, "5 of 5"),
        (software.judge_kernels, kernel_compilation.CompiledKernels(5, 1, True), (), NOTE, "first start compiles"),
        (software.judge_kernels, kernel_compilation.CompiledKernels(5, 1, False), (), WARN, "NUMBA_CACHE_DIR"),
        (software.judge_model, software.BundledModel(True, 6, ()), (), OK, "intact (6 files)"),
        (
            software.judge_model,
            software.BundledModel(True, 6, ("model.safetensors",)),
            (),
            FAIL,
            "damaged: model.safetensors",
        ),
        (software.judge_model, software.BundledModel(False, 0, ()), (), FAIL, "not installed"),
        (software.judge_model, software.BundledModel(True, 0, ()), (), WARN, "SHA256SUMS"),
        (machine.judge_cores, machine.Cores(8, 4, 0.5), (), OK, "4 usable of 8"),
        (machine.judge_cores, machine.Cores(8, 1, 0.5), (), WARN, "2 cores or more"),
        (machine.judge_cores, machine.Cores(8, 4, 9.0), (), WARN, "stop them"),
        (machine.judge_memory, GOOD_MEMORY, (), OK, "32 GiB free of 64 GiB"),
        (machine.judge_memory, replace(GOOD_MEMORY, available=GIB), (), FAIL, "--pool-bytes"),
        (machine.judge_memory, replace(GOOD_MEMORY, limit=4 * GIB, used=GIB), (), WARN, "limit is 4 GiB"),
        (machine.judge_memory, replace(GOOD_MEMORY, limit=2 * GIB, used=3 * GIB), (), FAIL, "0 B free"),
        (machine.judge_memory, replace(GOOD_MEMORY, swap_used=8 * GIB), (), WARN, "Turn swap off"),
        (machine.judge_files, machine.FileLimits(1 << 20, 1 << 20), (), OK, "1048576"),
        (machine.judge_files, machine.FileLimits(-1, -1), (), OK, "unlimited"),
        (machine.judge_files, machine.FileLimits(1024, -1), (), NOTE, "ulimit -n 4096"),
        (machine.judge_files, machine.FileLimits(256, 4096), (), FAIL, "256 (hard limit 4096)"),
        (
            machine.judge_huge_pages,
            machine.HugePages(0, 0, "madvise", True),
            (),
            OK,
            "transparent: madvise, shared memory on request",
        ),
        (machine.judge_huge_pages, machine.HugePages(0, 0, "madvise", False), (), NOTE, "use Linux 6.1 or newer"),
        (machine.judge_huge_pages, machine.HugePages(9, 0, "madvise", False), (), OK, "not for shared memory"),
        (machine.judge_huge_pages, machine.HugePages(512, 512, "never", True), (), NOTE, "vm.nr_hugepages=0"),
        (machine.judge_huge_pages, machine.HugePages(512, 12, "never", True), (), OK, "12 free"),
        (machine.judge_kernel, machine.Kernel("6.1", 0, 60, 65530, 4096), (), OK, "Linux 6.1"),
        (machine.judge_kernel, machine.Kernel("6.1", 2, 60, 65530, 4096), (), WARN, "vm.overcommit_memory=0"),
        (machine.judge_kernel, machine.Kernel("6.1", 0, 60, 65530, 128), (), NOTE, "somaxconn=4096"),
        (machine.judge_clock, machine.KernelClock(True, 0.002), (), OK, "within 0.002 s"),
        (machine.judge_clock, machine.KernelClock(False, 16.0), (), NOTE, "chrony"),
        (machine.judge_clock, machine.KernelClock(None, 0.0), (), NOTE, "unknown"),
        (storage.judge_run_dir, FOLDER, (), OK, "50 GiB free"),
        (storage.judge_run_dir, replace(FOLDER, problem="read-only"), (), FAIL, "--run-dir"),
        (storage.judge_run_dir, replace(FOLDER, path="/tmp/" + "x" * 60), (), FAIL, "too long a path"),
        (storage.judge_run_dir, replace(FOLDER, free=1 << 20), (), WARN, "another --run-dir"),
        (storage.judge_disk, FOLDER, (), OK, "at /tmp (ext4)"),
        (storage.judge_disk, replace(FOLDER, free=GIB), (), NOTE, "Free space"),
        (storage.judge_disk, replace(FOLDER, problem="cannot write files"), (), NOTE, "--out"),
        (storage.judge_shm, FOLDER, (), OK, "free of 100 GiB"),
        (storage.judge_shm, replace(FOLDER, total=64 << 20), (), NOTE, "--shm-size"),
        (storage.judge_shm, replace(FOLDER, problem="No such file or directory"), (), NOTE, "--shm-size"),
        (storage.judge_shared_memory, storage.SharedMemoryProbe(""), (), OK, "can be created"),
        (storage.judge_shared_memory, storage.SharedMemoryProbe("Operation not permitted"), (), FAIL, "memfd_create"),
        (storage.judge_ssd, None, (Purpose.POOL,), NOTE, "--pool-ssd-dir"),
        (
            storage.judge_ssd,
            SSD,
            (Purpose.POOL,),
            OK,
            "/ssd (xfs), 800 GiB free, direct I/O, durable 4 KiB writes take 0.4",
        ),
        (storage.judge_ssd, replace(SSD, problem="does not exist"), (), FAIL, "/ssd (xfs) does not exist"),
        (storage.judge_ssd, replace(SSD, kind="tmpfs"), (), FAIL, "is in memory"),
        (storage.judge_ssd, replace(SSD, free=GIB), (), WARN, "--pool-ssd-bytes"),
        (storage.judge_ssd, replace(SSD, is_direct=False), (), WARN, "no direct I/O"),
        (storage.judge_ssd, replace(SSD, sync_s=0.2), (), WARN, "writes take 200 ms"),
        (network.judge_port, network.Port(8000, ""), (), OK, "8000 is free"),
        (network.judge_port, network.Port(8000, "in use"), (), WARN, "another --port"),
        (network.judge_loopback, network.Loopback("", ""), (), OK, "work"),
        (network.judge_loopback, network.Loopback("timed out", ""), (), FAIL, "ip link set lo up"),
        (network.judge_loopback, network.Loopback("", "not permitted"), (), FAIL, "unix sockets: not permitted"),
        (network.judge_interfaces, (), (), NOTE, "only loopback is up"),
        (network.judge_interfaces, (), (Purpose.DECODE,), FAIL, "only loopback is up"),
        (
            network.judge_interfaces,
            (network.Interface("e", False, 1500, -1),),
            (Purpose.POOL,),
            FAIL,
            "only loopback is up",
        ),
        (network.judge_interfaces, (network.Interface("e", True, 1500, 1000),), (), OK, "e MTU 1500, 1 Gbit/s"),
        (network.judge_interfaces, (network.Interface("e", True, 1400, -1),), (), NOTE, "tunnel"),
        (network.judge_interfaces, (network.Interface("e", True, 1500, 100_000),), (), NOTE, "Raise the MTU to 9000"),
        (gpu.judge_driver, gpu.Driver(False), (), NOTE, "no NVIDIA GPU"),
        (gpu.judge_driver, gpu.Driver(False), (Purpose.GPU,), FAIL, "--gpus all"),
        (gpu.judge_driver, DRIVER, (Purpose.GPU,), OK, "NVIDIA H100 (80 GiB)"),
        (gpu.judge_driver, gpu.Driver(True, "570.86", problem="no libcuda.so.1"), (), WARN, "no libcuda.so.1"),
        (gpu.judge_driver, gpu.Driver(True, "570.86"), (Purpose.GPU,), FAIL, "it reports no GPU"),
        (gpu.judge_p2p, gpu.Driver(False), (Purpose.GPU,), OK, "two GPUs"),
        (gpu.judge_p2p, DRIVER, (), OK, "1 of 1 GPU pairs"),
        (gpu.judge_p2p, replace(DRIVER, num_p2p_pairs=0), (), NOTE, "through host memory"),
        (gpu.judge_torch, TORCH, (Purpose.GPU,), OK, "it finds 2"),
        (gpu.judge_torch, gpu.Torch("2.13.0+cpu", "", False, None), (), OK, "built without CUDA"),
        (gpu.judge_torch, gpu.Torch("2.13.0+cpu", "", True, None), (), WARN, "CUDA build"),
        (gpu.judge_torch, gpu.Torch("2.13.0+cpu", "", False, None), (Purpose.GPU,), FAIL, "CUDA build"),
        (gpu.judge_torch, replace(TORCH, num_gpus=0), (), WARN, "finds no GPU"),
        (gpu.judge_torch, replace(TORCH, num_gpus=0), (Purpose.GPU,), FAIL, "that the driver supports"),
        (gpu.judge_torch, replace(TORCH, num_gpus=None, problem="no answer within 3.5 s"), (), WARN, "no answer"),
    ],
)
def test_a_verdict_follows_from_what_was_observed(
    judge: Callable[[Any, Needs], Verdict], seen: Any, needs: tuple[Purpose, ...], level: Level, said: str
) -> None:
    verdict = judge(seen, frozenset(needs))
    assert verdict[0] is level
    assert said in " ".join(verdict[1:])
    assert (verdict[2] != "") == (level is not OK) or (level, verdict[1]) == (NOTE, "unknown")


def test_an_extra_is_named_with_what_it_is_for() -> None:
    extra = software.Extra("ray", "ray", "run a cluster on Ray")
    assert software.judge_extra(software.Package("ray", "2.60.0"), NOTHING, extra) == (OK, "2.60.0", "")
    level, _, advice = software.judge_extra(software.Package("ray", ""), NOTHING, extra)
    assert (level, advice) == (NOTE, "Needed only to run a cluster on Ray: pip install ray.")


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50), st.integers(0, 1 << 50), st.integers(0, 1 << 50))
def test_more_memory_is_never_judged_worse(available: int, more: int, limit: int, used: int) -> None:
    order = [FAIL, WARN, NOTE, OK]
    some = machine.Memory(1 << 51, available, limit, used, 0)
    before, after = (
        machine.judge_memory(seen, NOTHING)[0] for seen in (some, replace(some, available=available + more))
    )
    assert order.index(after) >= order.index(before)
    lifted = machine.judge_memory(replace(some, limit=0), NOTHING)[0]
    assert order.index(lifted) >= order.index(before)


@given(st.sets(st.sampled_from(list(Purpose))))
def test_a_purpose_can_only_make_verdicts_stricter(purposes: set[Purpose]) -> None:
    order = [FAIL, WARN, NOTE, OK]
    for judge, seen in (
        (network.judge_interfaces, ()),
        (gpu.judge_driver, gpu.Driver(False)),
        (gpu.judge_driver, gpu.Driver(True)),
        (gpu.judge_torch, gpu.Torch("2", "", False, None)),
    ):
        asked, plain = judge(seen, frozenset(purposes))[0], judge(seen, NOTHING)[0]  # type: ignore[operator]
        assert order.index(asked) <= order.index(plain)


@pytest.mark.parametrize(
    ("version", "least", "older"),
    [
        ("2.13.0+cpu", "2.6", False),
        ("2.6", "2.6", False),
        ("2.6.0", "2.6", False),
        ("2.5.9", "2.6", True),
        ("1.85.0rc1", "1.85", False),
        ("0.9", "", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, least: str, older: bool) -> None:
    assert software.is_older(version, least) is older


def test_every_module_that_numba_compiles_is_known() -> None:
    packages = ("engine", "kvpool", "messenger", "worker", "conductor", "prefill_node", "decode_node")
    ways = ("import numba", "from jit.compiling")
    compiling = {
        str(path.relative_to(ROOT))
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        if any(line.startswith(ways) for line in path.read_text().splitlines())
    }
    assert compiling == set(kernel_compilation.KERNELS)


def test_the_kernels_cache_is_sought_where_numba_keeps_it(tmp_path: Path) -> None:
    source = tmp_path / "package" / "kernels.py"
    source.parent.mkdir()
    assert kernel_compilation.cache_folder(source, {}) == source.parent / "__pycache__"
    assert kernel_compilation.cache_folder(source, {"NUMBA_CACHE_DIR": "/x"}) == Path("/x")
    nowhere = Path("/dev/null/package/kernels.py")  # a file: no folder can be made there
    assert kernel_compilation.cache_folder(nowhere, {"XDG_CACHE_HOME": "/c"}) == Path("/c/numba")


def test_a_damaged_model_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    known = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"  # of "x"
    (tmp_path / "SHA256SUMS").write_text(f"{known}  a\n{known}  b\n")
    assert software.observe_model(tmp_path) == software.BundledModel(True, 2, ("b",))
    (tmp_path / "b").write_text("y")
    assert software.observe_model(tmp_path).damaged == ("b",)


def test_the_bundled_model_is_that_of_its_recorded_hashes() -> None:
    seen = software.observe_model()
    assert (seen.damaged, seen.num_recorded >= 5) == ((), True)


def test_meminfo_is_read_in_bytes() -> None:
    found = machine.meminfo("MemTotal:  10 kB\nHugePages_Total:  3\nnonsense\n")
    assert found == {"MemTotal": 10240, "HugePages_Total": 3}


def test_a_pools_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    seen = storage.observe_ssd(tmp_path)
    assert seen is not None
    assert (seen.path, seen.problem, list(tmp_path.iterdir())) == (str(tmp_path), "", [])
    assert seen.free > 0
    assert seen.sync_s > 0
    missing = storage.observe_ssd(tmp_path / "missing")
    assert missing == storage.SsdFolder(str(tmp_path / "missing"), problem="does not exist")
    (tmp_path / "file").touch()
    unusable = storage.observe_ssd(tmp_path / "file")
    assert unusable is not None
    assert unusable.problem == "is not a folder"


def test_a_pools_folder_is_looked_at_where_one_is_meant(tmp_path: Path) -> None:
    def has_check(folder: Path | None, *needs: Purpose) -> bool:
        asked = DoctorOptions(pool_ssd_dir=folder, needs=frozenset(needs))
        return "pool SSD" in [check.name for check in all_checks(asked)]

    assert (has_check(None), has_check(None, Purpose.POOL), has_check(tmp_path)) == (False, True, True)


def test_a_path_belongs_to_the_innermost_mount() -> None:
    mounts = "/dev/a / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\nx /tmp/my\\040disk xfs rw 0 0\n"
    kinds = [storage.file_system(path, mounts) for path in ("/home", "/tmp/a", "/tmpa", "/tmp/my disk/b")]
    assert kinds == ["ext4", "tmpfs", "ext4", "xfs"]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_interfaces_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    for name, files in {
        "lo": {"mtu": "65536", "operstate": "unknown"},
        "eth0": {"mtu": "9000", "operstate": "up", "speed": "25000"},
        "tap0": {"mtu": "1400", "operstate": "unknown", "carrier": "1"},
        "ifb0": {"mtu": "1500", "operstate": "down"},
    }.items():
        for file, text in files.items():
            write(tmp_path / name / file, text)
    assert network.observe_interfaces(tmp_path) == (
        network.Interface("eth0", True, 9000, 25000),
        network.Interface("ifb0", False, 1500, -1),
        network.Interface("tap0", True, 1400, -1),
    )


def test_a_port_in_use_is_found(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert network.observe_port(port) == network.Port(port, "in use")
    assert network.observe_port(port) == network.Port(port, "")


LIBCUDA = """
#include <string.h>
int cuInit(unsigned flags) { return %d; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuDeviceGetCount(int *count) { *count = 3; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 10 + ordinal; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "GPU X", length); return 0; }
int cuDeviceTotalMem_v2(size_t *nbytes, int device) { *nbytes = device * (1UL << 30); return 0; }
int cuDeviceCanAccessPeer(int *can, int one, int other) { *can = one == 12 && other == 11; return 0; }
"""


@pytest.fixture
def libcuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Builds a driver library whose cuInit answers this, and has it found."""

    def build(init: int) -> None:
        (tmp_path / "cuda.c").write_text(LIBCUDA % init)
        command = ["gcc", "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(tmp_path / "cuda.c")]
        subprocess.run(command, check=True)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))

    return build


def test_the_drivers_own_library_is_asked(libcuda: Callable[[int], None]) -> None:
    libcuda(0)
    gpus = tuple(gpu.Gpu("GPU X", (10 + index) * GIB) for index in range(3))
    assert gpu.ask_driver("570") == gpu.Driver(True, "570", 12080, gpus, num_pairs=3, num_p2p_pairs=1)


def test_a_driver_in_trouble_is_quoted(libcuda: Callable[[int], None]) -> None:
    libcuda(803)
    assert gpu.ask_driver("570") == gpu.Driver(True, "570", problem="cuInit fails with CUDA error 803")


def test_a_check_that_hangs_or_raises_does_not_hold_up_the_others() -> None:
    for_ever = threading.Event()
    checks = [
        Check("hangs", for_ever.wait, lambda seen, needs: (OK, "", "")),
        Check("raises", lambda: 1 // 0, lambda seen, needs: (OK, "", "")),
        Check("works", lambda: 1, lambda seen, needs: (OK, "fine", "")),
    ]
    hangs, raises, works = examine(checks, NOTHING, deadline_s=0.5)
    for_ever.set()
    assert (hangs.level, hangs.found) == (WARN, "did not answer within 0.5 s")
    assert (raises.level, "ZeroDivisionError" in raises.found) == (WARN, True)
    assert works == CheckResult("works", OK, "fine")


def doctor(*flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moonpool", "doctor", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "200", **environ},
    )


def test_the_command_shows_every_check_and_one_sentence_of_advice() -> None:
    shown = doctor()
    findings = json.loads(doctor("--json").stdout)["checks"]
    assert [finding["check"] for finding in findings] == [check.name for check in all_checks(DoctorOptions())]
    assert all(finding["check"] in shown.stdout for finding in findings)
    assert shown.stderr == ""
    failed = any(finding["level"] == "fail" for finding in findings)
    assert shown.returncode == failed
    assert ("This machine can serve." in shown.stdout) is not failed


def test_what_is_asked_for_and_missing_is_a_failure(tmp_path: Path) -> None:
    too_long = tmp_path / ("x" * 90)
    too_long.mkdir()
    ended = doctor("--json", XDG_RUNTIME_DIR=str(too_long))
    told = json.loads(ended.stdout)
    assert (ended.returncode, told["ok"]) == (1, False)
    assert [f["check"] for f in told["checks"] if f["level"] == "fail" and "too long" in f["found"]] == [
        "run directory"
    ]
    assert doctor("--for", "teleportation").returncode == 2
