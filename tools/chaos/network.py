"""A network namespace per node of a cluster, joined by a bridge, with links that can be cut one by one.

Requires root, iproute2 and iptables (`tools.soak.namespaces.what_is_missing`). The caller stays outside and is the
"client" of the cluster: it reaches every node through the bridge.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Sequence

from tools.soak.namespaces import enter_namespace, run_tool

CLIENT = "client"


class Network:
    """Context manager that creates the namespaces; `addresses` by node, including the client's."""

    def __init__(self, nodes: Sequence[str]) -> None:
        mark = f"{os.getpid() % 100_000:05d}"
        self._bridge = f"mpc{mark}"
        net = f"10.{random.SystemRandom().randrange(100, 200)}.{os.getpid() % 250}"
        self._spaces = {node: f"mp-chaos-{mark}-{number}" for number, node in enumerate(nodes)}
        self._links = {node: f"mpc{mark}n{number}" for number, node in enumerate(nodes)}
        self.addresses = {node: f"{net}.{number + 1}" for number, node in enumerate(nodes)} | {CLIENT: f"{net}.254"}

    def __enter__(self) -> Network:
        try:
            self._create()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _create(self) -> None:
        run_tool("ip", "link", "add", self._bridge, "type", "bridge")
        run_tool("ip", "addr", "add", f"{self.addresses[CLIENT]}/24", "dev", self._bridge)
        run_tool("ip", "link", "set", self._bridge, "up")
        for node, space in self._spaces.items():
            run_tool("ip", "netns", "add", space)
            link = self._links[node]
            run_tool("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            run_tool("ip", "link", "set", link, "master", self._bridge, "up")
            run_tool("ip", "-n", space, "addr", "add", f"{self.addresses[node]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run_tool("ip", "-n", space, "link", "set", device, "up")

    def __exit__(self, *_: object) -> None:
        for space in self._spaces.values():
            run_tool("ip", "netns", "del", space, check=False)
        run_tool("ip", "link", "del", self._bridge, check=False)

    @contextlib.contextmanager
    def inside(self, node: str) -> Iterator[None]:
        """Run the calling thread, and processes that it starts, in the node's namespace."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/run/netns/{self._spaces[node]}", os.O_RDONLY)
        try:
            enter_namespace(there)
            yield
        finally:
            enter_namespace(before)
            os.close(there)
            os.close(before)

    def cut(self, node: str, peer: str, *, drops: bool) -> None:
        """Cut the link: packets vanish in both directions (`drops`), or are answered with a TCP reset."""
        self._rules("-I", node, peer, drops=drops)

    def join(self, node: str, peer: str, *, drops: bool) -> None:
        """Undo `cut`."""
        self._rules("-D", node, peer, drops=drops)

    def _rules(self, action: str, node: str, peer: str, *, drops: bool) -> None:
        verdict = ["-j", "DROP"] if drops else ["-j", "REJECT", "--reject-with", "tcp-reset"]
        rules = [(node, "INPUT", "-s", peer)]
        # The client has no namespace of its own: both directions are cut at the node.
        rules.append((node, "OUTPUT", "-d", peer) if peer == CLIENT else (peer, "INPUT", "-s", node))
        for where, chain, end, other in rules:
            run_tool(
                "ip", "netns", "exec", self._spaces[where], "iptables", "-w", action, chain, end, self.addresses[other],
                "-p", "tcp", *verdict,
            )  # fmt: skip


class SharedLoopback:
    """Stand-in for `Network` without namespaces: all nodes share 127.0.0.1, and no link can be cut."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.addresses = dict.fromkeys((*nodes, CLIENT), "127.0.0.1")

    def __enter__(self) -> SharedLoopback:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @contextlib.contextmanager
    def inside(self, node: str) -> Iterator[None]:
        """Do nothing."""
        yield
