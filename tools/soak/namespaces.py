"""Two simulated hosts for tests: network namespaces connected by veth pairs, each with a firewall.

Requires root, iproute2 and iptables (see `what_is_missing`). A thread that is `inside` a host uses its network, as do
all threads and processes that it starts meanwhile.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000
_TOOLS = {"ip": "iproute2", "iptables": "iptables"}


def what_is_missing() -> str | None:
    """Return why namespaces cannot be created on this machine; None if they can."""
    lacking = [package for tool, package in _TOOLS.items() if shutil.which(tool) is None]
    if lacking:
        return f"network namespaces need {' and '.join(lacking)}, which are not installed"
    probe = f"mp-probe-{os.getpid()}"
    made = run_tool("ip", "netns", "add", probe, check=False)
    if made.returncode:
        return f"network namespaces need root with CAP_SYS_ADMIN and CAP_NET_ADMIN: {made.stderr.strip()}"
    filtered = run_tool("ip", "netns", "exec", probe, "iptables", "-L", check=False)
    run_tool("ip", "netns", "del", probe)
    return f"iptables does not work here: {filtered.stderr.strip()}" if filtered.returncode else None


class TwoHosts:
    """Context manager that creates two hosts, numbered 0 and 1, connected by `wires` networks.

    `addresses[n]` is the address of host n on the first wire.
    """

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self, wires: int = 1) -> None:
        self._wires = wires
        self.names = tuple(f"mp-{os.getpid()}-{number}" for number in range(2))

    def __enter__(self) -> "TwoHosts":
        for name in self.names:
            run_tool("ip", "netns", "add", name)
        near, far = self.names
        for wire in range(self._wires):
            device = _device(wire)
            run_tool("ip", "link", "add", device, "netns", near, "type", "veth", "peer", "name", device, "netns", far)
            for host, name in enumerate(self.names):
                run_tool("ip", "-n", name, "addr", "add", f"{self.address(host, wire)}/24", "dev", device)
                for each in ("lo", device):
                    run_tool("ip", "-n", name, "link", "set", each, "up")
        return self

    def address(self, host: int, wire: int) -> str:
        """Return the host's address on a wire."""
        network, _, number = self.addresses[host].rpartition(".")
        return f"{network.rpartition('.')[0]}.{wire}.{number}"

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            run_tool("ip", "netns", "del", name)

    def command(self, host: int) -> list[str]:
        """Return the command prefix that runs a command on the host."""
        return ["ip", "netns", "exec", self.names[host]]

    def firewall(self, host: int, *rule: str) -> None:
        """Run iptables on the host, e.g. `firewall(1, "-A", "INPUT", "-j", "DROP")`."""
        run_tool(*self.command(host), "iptables", *rule)

    def passed(self, host: int, chain: str) -> list[int]:
        """Return the packet count of each rule of the chain."""
        listed = run_tool(*self.command(host), "iptables", "-L", chain, "-v", "-x", "-n").stdout.splitlines()
        return [int(line.split()[0]) for line in listed[2:]]

    def heal(self) -> None:
        """Remove all rules and limits, and set the links up."""
        for host, name in enumerate(self.names):
            self.firewall(host, "-F")
            for wire in range(self._wires):
                run_tool("ip", "-n", name, "link", "set", _device(wire), "up")
                run_tool(*self._shape(host, wire, "del"), check=False)

    def unplug(self, host: int, wire: int = 0) -> None:
        """Set the host's end of a link down."""
        run_tool("ip", "-n", self.names[host], "link", "set", _device(wire), "down")

    def limit(self, host: int, wire: int, bytes_s: int) -> None:
        """Limit the speed at which the host sends by a wire (a token bucket; needs the kernel's sch_tbf)."""
        shape = ("tbf", "rate", f"{8 * bytes_s}bit", "burst", "256kb", "latency", "20ms")
        run_tool(*self._shape(host, wire, "replace"), *shape)

    def _shape(self, host: int, wire: int, action: str) -> list[str]:
        return [*self.command(host), "tc", "qdisc", action, "dev", _device(wire), "root"]

    @contextlib.contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """Run the calling thread on the host."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/run/netns/{self.names[host]}", os.O_RDONLY)
        try:
            enter_namespace(there)
            yield
        finally:
            enter_namespace(before)
            os.close(there)
            os.close(before)


def _device(wire: int) -> str:
    return f"wire{wire}" if wire else "wire"


def enter_namespace(namespace: int) -> None:
    """Move the calling thread into the network namespace of this descriptor. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")


def run_tool(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Raises OSError if it fails and `check` is set."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done
