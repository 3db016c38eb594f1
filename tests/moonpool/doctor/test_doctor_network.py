"""The doctor on RDMA ports, locked memory, and peers that do not answer: recorded machines, real sockets."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.doctor import machine, peers, rdma
from moonpool.doctor.checks import Level, Needs, Purpose
from moonpool.doctor.machine import HostEnvironment, Locking
from moonpool.doctor.peers import ConnectResult, Greeting, PeerProbe, PeerProtocol, Tracking
from moonpool.doctor.rdma import UserSpace

GIB, MIB = 1 << 30, 1 << 20
NOTHING: Needs = frozenset()
FOR_RDMA: Needs = frozenset({Purpose.RDMA})
OK, NOTE, WARN, FAIL = Level.OK, Level.NOTE, Level.WARN, Level.FAIL


# Ports.


def test_every_port_is_named_with_why_it_is_taken_or_left_out(eight_by_eight: Any) -> None:
    eight_by_eight.write("sys/class/infiniband/mlx5_6/ports/1/state", "1: DOWN")
    level, found, advice = rdma.judge_ports(rdma.observe_ports(root=eight_by_eight.root), FOR_RDMA)
    lines = found.splitlines()
    assert level is NOTE
    assert "mlx5_6/1" in advice
    assert lines[0] == "mlx5_0/1 taken: RoCE v2 at 10.0.0.5 (GID 3), 400 Gb/s"
    assert lines[6].startswith("mlx5_6/1 left out: its link is DOWN")
    assert "slower than a quarter of the fastest" in lines[8]


@pytest.mark.parametrize(("needs", "level"), [(NOTHING, NOTE), (FOR_RDMA, FAIL)])
def test_a_machine_without_devices_is_told_that_kv_goes_over_tcp(tmp_path: Path, needs: Needs, level: Level) -> None:
    verdict = rdma.judge_ports(rdma.observe_ports(root=tmp_path), needs)
    assert verdict[:2] == (level, "no device")
    assert "/dev/infiniband" in verdict[2]


@pytest.mark.parametrize(
    ("port", "said"),
    [
        ({"state": "1: DOWN", "addresses": ("10.0.0.1/24",)}, "its link is DOWN"),
        ({"addresses": ("fe80::1/64",)}, "RoCE v2 GIDs are all link-local: give eth0 a routable IP address"),
        ({"addresses": ()}, "its GID table is empty: give eth0 an IP address"),
        ({"addresses": ("10.0.0.1/24",), "kinds": ("IB/RoCE v1",)}, "GIDs of RoCE v1 only"),
    ],
)
def test_ports_that_are_there_but_unusable_are_a_failure_where_rdma_is_meant(
    rdma_machine: Any, port: dict[str, Any], said: str
) -> None:
    rdma_machine.interface("eth0")
    rdma_machine.nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0", netdev="eth0", **port)
    seen = rdma.observe_ports(root=rdma_machine.root)
    assert rdma.judge_ports(seen, NOTHING)[0] is WARN
    level, found, advice = rdma.judge_ports(seen, FOR_RDMA)
    assert (level, bool(advice)) == (FAIL, True)
    assert said in found


def test_a_device_that_is_asked_for_and_not_there_is_named(eight_by_eight: Any) -> None:
    level, found, advice = rdma.judge_ports(rdma.observe_ports(("mlx5_1", "mlx4_9"), eight_by_eight.root), FOR_RDMA)
    assert level is FAIL
    assert "mlx5_1/1 taken: requested" in found
    assert "mlx4_9 left out: there is no such device" in found
    assert "rdma_devices" in advice


@pytest.mark.parametrize(("mtu", "level", "said"), [(9000, OK, "4096-byte packets"), (1500, NOTE, "1024-byte packets")])
def test_small_packets_are_noted_with_the_interfaces_mtu(rdma_machine: Any, mtu: int, level: Level, said: str) -> None:
    rdma_machine.interface("eth0", mtu=mtu)
    rdma_machine.nic("rxe0", netdev="eth0", addresses=("10.0.2.15/24",))
    verdict = rdma.judge_mtu(rdma.observe_ports(root=rdma_machine.root), FOR_RDMA)
    assert verdict[0] is level
    assert f"rxe0/1: {said} (eth0 MTU {mtu})" in verdict[1]
    assert ("ip link set eth0 mtu 9000" in verdict[2]) == (level is NOTE)


def test_infiniband_has_no_interface_whose_mtu_could_be_wrong(rdma_machine: Any) -> None:
    rdma_machine.nic("mlx5_0", layer="InfiniBand", lid="0x3", addresses=("fe80::7/64",))
    seen = rdma.observe_ports(root=rdma_machine.root)
    assert rdma.judge_ports(seen, FOR_RDMA)[0] is OK
    assert rdma.judge_mtu(seen, FOR_RDMA)[0] is OK


@pytest.mark.parametrize(
    ("seen", "needs", "level", "said"),
    [
        (UserSpace(1, (), 1, (), ""), FOR_RDMA, OK, "1 devices can be opened"),
        (UserSpace(0, ("ib_uverbs", "rdma_ucm"), 0, (), ""), FOR_RDMA, OK, "there is no device"),
        (UserSpace(1, (), 1, (), "No module named 'pyverbs'"), NOTHING, NOTE, "python3-pyverbs"),
        (UserSpace(1, (), 1, (), "No module named 'pyverbs'"), FOR_RDMA, FAIL, "python3-pyverbs"),
        (UserSpace(1, ("ib_uverbs",), 0, (), ""), FOR_RDMA, FAIL, "modprobe ib_uverbs"),
        (UserSpace(1, (), 0, (), ""), FOR_RDMA, FAIL, "--device /dev/infiniband"),
        (UserSpace(2, (), 2, ("uverbs1",), ""), FOR_RDMA, FAIL, "uverbs1 in /dev/infiniband: permission denied"),
        (UserSpace(1, ("rdma_ucm",), 1, (), ""), FOR_RDMA, NOTE, "modprobe rdma_ucm"),
    ],
)
def test_what_keeps_user_space_from_the_devices_is_named(
    seen: UserSpace, needs: Needs, level: Level, said: str
) -> None:
    verdict = rdma.judge_user_space(seen, needs)
    assert verdict[0] is level
    assert said in " ".join(verdict[1:])


def test_modules_and_device_files_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "sys/class/infiniband/rxe0").mkdir(parents=True)
    seen = rdma.observe_user_space(tmp_path)
    assert (seen.num_devices, seen.missing_modules, seen.num_files) == (1, ("ib_uverbs", "rdma_ucm"), 0)
    (tmp_path / "sys/module/ib_uverbs").mkdir(parents=True)
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    for name in ("uverbs0", "uverbs1", "rdma_cm"):
        (tmp_path / "dev/infiniband" / name).touch()
    seen = rdma.observe_user_space(tmp_path)
    assert (seen.missing_modules, seen.num_files, seen.denied) == ((), 2, ())


@pytest.mark.skipif(os.getuid() != 0, reason="takes rights away from another user, which root alone can try")
def test_files_that_this_user_may_not_open_are_found(short_path: Path) -> None:
    short_path.chmod(0o755)
    folder = short_path / "dev/infiniband"
    folder.mkdir(parents=True)
    (folder / "uverbs0").touch(mode=0o600)
    script = (
        "import os; from pathlib import Path; from moonpool.doctor import rdma; os.setuid(65534); "
        f"print(rdma.observe_user_space(Path({str(short_path)!r})).denied)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "('uverbs0',)"


@pytest.mark.parametrize(
    ("module", "peer_module", "level", "said"),
    [
        ("NVIDIA UNIX Open Kernel Module for x86_64  570.86", "", OK, "by dmabuf"),
        ("NVIDIA UNIX Open Kernel Module for x86_64  570.86", "nvidia_peermem", OK, "by dmabuf or peer memory"),
        ("NVIDIA UNIX x86_64 Kernel Module  535.54", "nv_peer_mem", OK, "by peer memory"),
        ("NVIDIA UNIX x86_64 Kernel Module  535.54", "", FAIL, "modprobe nvidia-peermem"),
    ],
)
def test_what_lets_adapters_reach_gpu_memory_is_looked_for(
    rdma_machine: Any, module: str, peer_module: str, level: Level, said: str
) -> None:
    needs = frozenset({Purpose.RDMA, Purpose.GPU})
    rdma_machine.write("proc/driver/nvidia/version", module)
    assert rdma.judge_gpu_path(rdma.observe_gpu_path(rdma_machine.root), needs)[0] is OK  # neither GPU nor adapter
    rdma_machine.write("dev/nvidia0", "")
    rdma_machine.nic("mlx5_0", layer="InfiniBand")
    if peer_module:
        rdma_machine.write(f"sys/module/{peer_module}/refcnt", "0")
    verdict = rdma.judge_gpu_path(rdma.observe_gpu_path(rdma_machine.root), needs)
    assert verdict[0] is level
    assert said in " ".join(verdict[1:])


# Locked memory.


@pytest.mark.parametrize(
    ("seen", "needs", "level", "said"),
    [
        (Locking(-1, -1, False, HostEnvironment.SHELL, GIB), FOR_RDMA, OK, "unlimited"),
        (Locking(8 * MIB, -1, True, HostEnvironment.SHELL, GIB), FOR_RDMA, OK, "CAP_IPC_LOCK overrides"),
        (Locking(2 * GIB, -1, False, HostEnvironment.SHELL, GIB), FOR_RDMA, OK, "enough to register 1 GiB"),
        (Locking(8 * MIB, -1, False, HostEnvironment.SHELL, GIB), NOTHING, NOTE, "ulimit -l unlimited"),
        (Locking(8 * MIB, 8 * MIB, False, HostEnvironment.SHELL, GIB), FOR_RDMA, FAIL, "limits.conf"),
        (Locking(8 * MIB, -1, False, HostEnvironment.SYSTEMD, GIB), FOR_RDMA, FAIL, "LimitMEMLOCK=infinity"),
        (Locking(8 * MIB, -1, False, HostEnvironment.CONTAINER, GIB), FOR_RDMA, FAIL, "--ulimit memlock=-1"),
        (Locking(8 * MIB, -1, False, HostEnvironment.CONTAINER, GIB), FOR_RDMA, FAIL, "a container without IPC_LOCK"),
        (Locking(8 * MIB, -1, False, HostEnvironment.KUBERNETES, GIB), FOR_RDMA, FAIL, "capabilities.add: [IPC_LOCK]"),
        (Locking(8 * MIB, -1, False, HostEnvironment.SHELL, 64 * GIB), FOR_RDMA, FAIL, "registers, here 64 GiB"),
    ],
)
def test_a_limit_on_locked_memory_is_held_against_what_is_registered(
    seen: Locking, needs: Needs, level: Level, said: str
) -> None:
    verdict = machine.judge_locking(seen, needs)
    assert verdict[0] is level
    assert said in " ".join(verdict[1:])


@pytest.mark.parametrize(
    ("mark", "environ", "expected"),
    [
        ("", {}, HostEnvironment.SHELL),
        ("", {"INVOCATION_ID": "x"}, HostEnvironment.SYSTEMD),
        (".dockerenv", {"INVOCATION_ID": "x"}, HostEnvironment.CONTAINER),
        ("run/.containerenv", {}, HostEnvironment.CONTAINER),
        (".dockerenv", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, HostEnvironment.KUBERNETES),
        ("var/run/secrets/kubernetes.io/x", {}, HostEnvironment.KUBERNETES),
    ],
)
def test_who_sets_the_limits_is_told_by_the_marks_they_leave(
    tmp_path: Path, mark: str, environ: dict[str, str], expected: HostEnvironment
) -> None:
    if mark:
        (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / mark).touch()
    assert machine.surroundings(tmp_path, environ) is expected


@pytest.mark.parametrize(
    ("capabilities", "id_map", "may_exceed"),
    [
        ("000001ffffffffff", "0 0 4294967295", True),
        ("00000000a80425fb", "0 0 4294967295", False),  # what Docker gives by default
        ("000001ffffffffff", "0 100000 65536", False),  # a user namespace: the host does not honour it
        ("0000000000004000", "0 0 4294967295", True),
    ],
)
def test_the_capability_counts_in_the_hosts_own_namespace(
    rdma_machine: Any, capabilities: str, id_map: str, may_exceed: bool
) -> None:
    rdma_machine.write("proc/self/status", f"Name:\tx\nCapPrm:\t0\nCapEff:\t{capabilities}")
    rdma_machine.write("proc/self/uid_map", id_map)
    assert machine.observe_locking(GIB, rdma_machine.root, {}).may_exceed is may_exceed


def test_this_process_has_the_limit_that_it_was_started_with() -> None:
    script = "from moonpool.doctor import machine; seen = machine.observe_locking(1); print(seen.soft, seen.hard)"
    command = ["bash", "-c", f"ulimit -S -l 4096; ulimit -H -l 8192; exec {sys.executable} -c '{script}'"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.split() == [str(4 * MIB), str(8 * MIB)]


# Peers.


@pytest.fixture
def full_listener() -> Iterator[int]:
    """A port whose queue of connections is full: the kernel drops what more comes, as a firewall would."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = []
        try:
            while True:  # until one stays unanswered
                client = socket.socket()
                waiting.append(client)
                client.settimeout(0.3)
                client.connect(listener.getsockname())
        except TimeoutError:
            yield listener.getsockname()[1]
        finally:
            for client in waiting:
                client.close()


def test_a_port_where_nobody_greets_back_is_told_apart_from_one_that_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        seen = peers.observe_peer(f"127.0.0.1:{listener.getsockname()[1]}")
    assert seen.answer is ConnectResult.OPEN
    level, found, _ = peers.judge_peer(seen, NOTHING)
    assert (level, "accepts the connection, but sends no reply" in found) == (WARN, True)


def test_the_other_way_of_rdma_is_told_where_a_messenger_answers() -> None:
    seen = PeerProbe("h:1", ConnectResult.OPEN, greeting=Greeting(PeerProtocol.MESSENGER, "node 'n'"))
    assert peers.judge_peer(seen, NOTHING)[0] is OK
    level, _, advice = peers.judge_peer(seen, FOR_RDMA)
    assert (level, "UDP port 4791" in advice) == (NOTE, True)


def test_a_refused_port_and_a_silent_one_are_told_apart(full_listener: int) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        refused = peers.observe_peer(f"127.0.0.1:{closed.getsockname()[1]}")
    silent = peers.observe_peer(f"127.0.0.1:{full_listener}", within_s=0.5)
    assert (refused.answer, silent.answer) == (ConnectResult.REFUSED, ConnectResult.SILENT)
    assert "nothing listens" in peers.judge_peer(refused, NOTHING)[2]
    assert "a firewall drops them" in peers.judge_peer(silent, NOTHING)[2]
    assert peers.judge_peer(silent, NOTHING)[0] is FAIL


def test_an_unknown_name_is_no_matter_of_firewalls() -> None:
    seen = peers.observe_peer("no-such-host.invalid:7000")
    assert seen.answer is ConnectResult.UNKNOWN
    assert "Check the name" in peers.judge_peer(seen, NOTHING)[2]


@pytest.mark.parametrize("answer", [answer for answer in ConnectResult if answer is not ConnectResult.OPEN])
def test_every_failure_has_its_advice(answer: ConnectResult) -> None:
    level, found, advice = peers.judge_peer(PeerProbe("h:1", answer, "why"), NOTHING)
    assert (level, found, bool(advice)) == (FAIL, "h:1: why", True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.2:7100", ("10.0.0.2", 7100)),
        ("[fe80::1]:1", ("fe80::1", 1)),
        ("node-1.example:65535", ("node-1.example", 65535)),
    ],
)
def test_a_peers_address_is_taken_apart(text: str, expected: tuple[str, int]) -> None:
    assert peers.split_address(text) == expected


@pytest.mark.parametrize(
    "text", ["", "host", ":7000", "host:", "host:0", "host:65536", "host:x", "fe80::1:7000", "[]:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        peers.split_address(text)


@pytest.mark.parametrize(
    ("count", "most", "level"), [(0, 0, OK), (10, 262144, OK), (210_000, 262_144, WARN), (262_144, 262_144, WARN)]
)
def test_a_full_table_of_connections_is_a_warning(rdma_machine: Any, count: int, most: int, level: Level) -> None:
    if most:
        rdma_machine.write("proc/sys/net/netfilter/nf_conntrack_count", str(count))
        rdma_machine.write("proc/sys/net/netfilter/nf_conntrack_max", str(most))
    seen = peers.observe_tracking(rdma_machine.root)
    assert seen == Tracking(count, most)
    verdict = peers.judge_tracking(seen, NOTHING)
    assert verdict[0] is level
    assert ("nf_conntrack_max" in verdict[2]) == (level is WARN)


# The command.


def doctor(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moonpool", "doctor", *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "COLUMNS": "200"}
    )


@pytest.mark.skipif(Path("/sys/class/infiniband").is_dir(), reason="this machine has RDMA devices")
def test_without_rdma_devices_a_machine_is_not_fit_for_rdma() -> None:
    ended = doctor("--for", "rdma", "--json")
    failed = [f["check"] for f in json.loads(ended.stdout)["checks"] if f["level"] == "fail"]
    assert (ended.returncode, "RDMA ports" in failed) == (1, True)


def test_peers_are_tried_and_one_that_refuses_makes_the_command_fail() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        good, bad = (f"127.0.0.1:{one.getsockname()[1]}" for one in (listener, closed))
        ended = doctor("--peer", good, "--peer", bad, "--json")
    levels = {f["check"]: f["level"] for f in json.loads(ended.stdout)["checks"]}
    assert (ended.returncode, levels[f"peer {good}"], levels[f"peer {bad}"]) == (1, "warn", "fail")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--peer", "nowhere"), "must be HOST:PORT, got 'nowhere'"),
        (("--registered", "much"), "--registered must be a number of bytes"),
    ],
)
def test_flags_that_make_no_sense_are_refused_with_what_was_expected(flags: tuple[str, str], said: str) -> None:
    ended = doctor(*flags)
    assert (ended.returncode, said in ended.stderr) == (2, True)
