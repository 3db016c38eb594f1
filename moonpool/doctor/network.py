"""Checks of the network: the API's port, loopback, interfaces, and the TLS files that the environment names."""

import errno
import os
import socket
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moonpool.doctor.checks import ONE_AT_A_TIME, Check, Level, Needs, Purpose, Verdict, optional, read_text
from moonpool.errors import ConfigError
from moonpool.transport_security import settings_of_environment

DEFAULT_PORT: Final = 8000
_CONNECT_S: Final = 2.0
_ETHERNET_MTU: Final = 1500
_JUMBO_MTU: Final = 9000


@dataclass(frozen=True)
class Port:
    """A TCP port of 127.0.0.1; `problem` is "" if a server can listen on it."""

    number: int
    problem: str


def observe_port(number: int) -> Port:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", number))
            probe.listen(1)
    except OSError as error:
        return Port(number, "in use" if error.errno == errno.EADDRINUSE else str(error.strerror))
    return Port(number, "")


def judge_port(seen: Port, needs: Needs) -> Verdict:
    if seen.problem:
        advice = "If the program is not your own Moonpool cluster, stop it, or choose another --port."
        return Level.WARN, f"{seen.number}: {seen.problem}", advice
    return Level.OK, f"{seen.number} is free", ""


@dataclass(frozen=True)
class Loopback:
    """Reachability within this machine: over TCP to 127.0.0.1 and over unix sockets; "" means no problem."""

    tcp_problem: str
    unix_problem: str


def observe_loopback() -> Loopback:
    return Loopback(_problem_of(_talk_tcp), _problem_of(_talk_unix))


def judge_loopback(seen: Loopback, needs: Needs) -> Verdict:
    if seen.tcp_problem:
        return Level.FAIL, f"127.0.0.1: {seen.tcp_problem}", "Bring the loopback interface up: ip link set lo up."
    if seen.unix_problem:
        advice = (
            "Allow unix sockets in the container's security profile: the processes of a host communicate over them."
        )
        return Level.FAIL, f"unix sockets: {seen.unix_problem}", advice
    return Level.OK, "TCP and unix sockets work", ""


@dataclass(frozen=True)
class Interface:
    """A network interface other than loopback."""

    name: str
    is_up: bool
    mtu: int
    speed_mbit: int  # -1: unknown, as for virtual interfaces


def observe_interfaces(root: Path = Path("/sys/class/net")) -> tuple[Interface, ...]:
    """Return the interfaces other than loopback."""
    found = []
    for folder in sorted(root.glob("*")) if root.is_dir() else []:
        if folder.name == "lo" or not (folder / "mtu").is_file():
            continue
        state = read_text(folder / "operstate")
        carrier = read_text(folder / "carrier")
        found.append(
            Interface(
                folder.name,
                state == "up" or (state == "unknown" and carrier == "1"),
                int(read_text(folder / "mtu") or 0),
                int(read_text(folder / "speed") or -1),
            )
        )
    return tuple(found)


def judge_interfaces(seen: tuple[Interface, ...], needs: Needs) -> Verdict:
    up = [interface for interface in seen if interface.is_up]
    if not up:
        level = optional(needs, Purpose.PREFILL, Purpose.DECODE, Purpose.POOL, Purpose.RDMA)
        return (
            level,
            "only loopback is up",
            "Bring up another interface to serve on several hosts; a single host needs none.",
        )
    found = ", ".join(
        f"{each.name} MTU {each.mtu}{f', {each.speed_mbit / 1000:g} Gbit/s' if each.speed_mbit > 0 else ''}"
        for each in up
    )
    if any(each.mtu < _ETHERNET_MTU for each in up):
        return Level.NOTE, found, f"An MTU below {_ETHERNET_MTU}, as in tunnels, reduces throughput between hosts."
    if any(each.speed_mbit >= 10_000 and each.mtu < _JUMBO_MTU for each in up):
        advice = f"Raise the MTU to {_JUMBO_MTU} on every hop between hosts: KV is sent in large transfers."
        return Level.NOTE, found, advice
    return Level.OK, found, ""


def _talk_tcp() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), _CONNECT_S) as client,
    ):
        server.settimeout(_CONNECT_S)
        accepted, _ = server.accept()
        with accepted:
            client.sendall(b"x")
            accepted.settimeout(_CONNECT_S)
            accepted.recv(1)


def _talk_unix() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with one, other:
        one.sendall(b"x")
        other.settimeout(_CONNECT_S)
        other.recv(1)


def _problem_of(talk: object) -> str:
    assert callable(talk)
    try:
        talk()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def checks(port: int) -> tuple[Check, ...]:
    """Return the checks of the network; `port` is the one to serve on."""
    return (
        Check("port", lambda: observe_port(port), judge_port),
        Check("loopback", observe_loopback, judge_loopback),
        Check("interfaces", observe_interfaces, judge_interfaces),
    )


_SOON_S: Final = 14 * 86400.0


@dataclass(frozen=True)
class KeyMaterial:
    """TLS files named by the environment; `cert` is "" if none is. `problem` is "" if they are usable, for `left_s`."""

    cert: str = ""
    problem: str = ""
    left_s: float = 0.0
    open_key: str = ""  # a private key that other users can read


def observe_key_material(environ: Mapping[str, str] = os.environ) -> KeyMaterial:
    try:
        settings = settings_of_environment(environ).tls
    except ConfigError as error:
        return KeyMaterial("?", str(error))
    with ONE_AT_A_TIME:
        if settings.tls_cert is None:
            return KeyMaterial()
        from rpc.errors import InvalidArgument
        from rpc.tls import TlsFiles, load

        files = TlsFiles.of(settings)
        assert files is not None  # the three paths are set together

    try:
        material = load(files)
    except InvalidArgument as error:
        return KeyMaterial(str(files.cert), str(error))
    is_open = files.key.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
    return KeyMaterial(str(files.cert), "", material.expires_s - time.time(), str(files.key) if is_open else "")


def judge_key_material(seen: KeyMaterial, needs: Needs) -> Verdict:
    if seen.problem:
        return (
            Level.FAIL,
            seen.problem,
            "No node starts with these files: see Encrypting traffic in docs/securing.md.",
        )
    if not seen.cert:
        advice = "Set tls_cert, tls_key and tls_ca for traffic between hosts, unless the network is private."
        return Level.NOTE, "MOONPOOL_TLS_CERT and MOONPOOL_CONFIG name no certificate", advice
    found = f"{seen.cert} is valid for {seen.left_s / 86400:.0f} more days"
    if seen.open_key:
        return Level.WARN, f"{found}; other users can read {seen.open_key}", f"Run chmod 600 {seen.open_key}."
    if seen.left_s < _SOON_S:
        return Level.WARN, found, "Replace the certificate in the same files: nodes reload it without a restart."
    return Level.OK, found, ""


CHECKS: Final = (Check("encryption", observe_key_material, judge_key_material),)
