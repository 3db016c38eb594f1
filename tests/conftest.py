"""Fixtures and settings of all tests."""

import gc
import ipaddress
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.order import order_of
from tools.soak.namespaces import what_is_missing

# Machines are shared and noisy: no example is judged by its time. Failures must come back when they are looked into.
settings.register_profile("moonpool", deadline=None, derandomize=True)
settings.load_profile("moonpool")

# Tests interrupt themselves and their children, but what a shell runs in the background is made to ignore that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent

# Programs that tests start run the code of this tree, even if another one is installed. They do not search the working
# directory (`-P`).
_SOURCES = [str(TESTS.parent), str(TESTS.parent / "proto"), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _SOURCES))
CERTIFICATES = TESTS / "data" / "tls"

# Without a GPU, kernels of Triton run in its interpreter. Triton reads this whenever it defines a kernel, some of them
# when it is imported, which any test may cause.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Within a file the order stays."""
    files = {item: str(item.path.relative_to(TESTS)) for item in items}
    order = order_of(files.values())
    items.sort(key=lambda item: (order[files[item]], files[item]))


def pytest_collection_finish() -> None:
    """Modules and items live until the end: whoever collects garbage need not look at them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def namespaces() -> None:
    """For tests between hosts of their own. Where CI must have them, a machine that cannot make them has failed."""
    missing = what_is_missing()
    if missing is not None:
        if os.environ.get("REQUIRE_NETNS"):
            pytest.fail(f"REQUIRE_NETNS is set, and {missing}")
        pytest.skip(missing)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path is short enough for unix sockets inside, which `tmp_path` need not be."""
    path = Path(tempfile.mkdtemp(prefix="mp-"))
    yield path
    shutil.rmtree(path)


class OtlpReceiver:
    """A collector: takes spans over HTTP, as any of them does. While `is_silent` it answers nobody."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.is_silent = threading.Event()
        self._over = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                while receiver.is_silent.is_set() and not receiver._over.wait(0.01):
                    pass
                receiver._take(self.path, dict(self.headers.items()), body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def _take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert path == "/v1/traces"
        self.headers.append(headers)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = _attributes(resource.resource.attributes)
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        {
                            "name": span.name,
                            "trace": span.trace_id.hex(),
                            "id": span.span_id.hex(),
                            "parent": span.parent_span_id.hex(),
                            "node": about["service.instance.id"],
                            "service": about["service.name"],
                            "start_ns": span.start_time_unix_nano,
                            "end_ns": span.end_time_unix_nano,
                            "is_error": span.status.code == 2,
                            "status": span.status.message,
                            "events": [event.name for event in span.events],
                            "about": _attributes(span.attributes),
                        }
                    )

    def trace(self, trace_id: str) -> list[dict[str, Any]]:
        """The spans of a trace that have come so far."""
        return [span for span in self.spans if span["trace"] == trace_id]

    def close(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@pytest.fixture(scope="module")
def otlp_receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


class RdmaMachine:
    """The files that the kernel of a server with RDMA adapters shows, below `root`: real folders, files and links."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/net/route", "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT")
        self.write("proc/net/if_inet6", "")

    def write(self, path: str | Path, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def link(self, path: str, target: str) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(self.root / target, link.parent))

    def pci(self, path: str, numa_node: int) -> str:
        """A PCI device by its way from the host bridge, such as "pci0000:15/0000:15:01.0/0000:16:00.0"."""
        folder = f"sys/devices/{path}"
        self.write(f"{folder}/numa_node", str(numa_node))
        self.link(f"sys/bus/pci/devices/{path.rsplit('/', 1)[1]}", folder)
        return folder

    def interface(self, name: str, *, mtu: int = 9000, bond: str = "") -> None:
        self.write(f"sys/class/net/{name}/mtu", str(mtu))
        if bond:
            (self.root / f"sys/class/net/{bond}/bonding").mkdir(parents=True, exist_ok=True)
            self.link(f"sys/class/net/{name}/master", f"sys/class/net/{bond}")

    def nic(
        self,
        name: str,
        pci: str = "",
        *,
        numa_node: int = 0,
        layer: str = "Ethernet",
        state: str = "4: ACTIVE",
        rate: str = "400 Gb/sec (4X NDR)",
        lid: str = "0x0",
        netdev: str = "",
        addresses: Sequence[str] = (),
        kinds: Sequence[str] = ("IB/RoCE v1", "RoCE v2"),
        port: int = 1,
    ) -> None:
        """`addresses` ("10.0.1.5/24", "fe80::1/64") become GIDs of each of the kinds; `pci` "" is a software device."""
        folder = f"sys/class/infiniband/{name}/ports/{port}"
        if pci and not (self.root / f"sys/class/infiniband/{name}").exists():
            device = self.pci(pci, numa_node)
            self.link(f"sys/class/infiniband/{name}/device", device)
        if pci and netdev:
            self.write(f"sys/devices/{pci}/net/{netdev}/dev_port", str(port - 1))
        for file, text in {"link_layer": layer, "state": state, "rate": rate, "lid": lid}.items():
            self.write(f"{folder}/{file}", text)
        index = 0
        for interface in map(ipaddress.ip_interface, addresses):
            value = int(interface.ip) | (0xFFFF << 32 if interface.version == 4 else 0)
            for kind in kinds:
                self.write(f"{folder}/gids/{index}", ipaddress.IPv6Address(value).exploded)
                self.write(f"{folder}/gid_attrs/types/{index}", kind)
                self.write(f"{folder}/gid_attrs/ndevs/{index}", netdev)
                index += 1
            self._subnet(netdev, interface)
        self.write(f"{folder}/gids/{index}", ipaddress.IPv6Address(0).exploded)  # a table is larger than what is used

    def _subnet(self, netdev: str, interface: ipaddress.IPv4Interface | ipaddress.IPv6Interface) -> None:
        if isinstance(interface, ipaddress.IPv6Interface):
            bits, table = interface.network.prefixlen, self.root / "proc/net/if_inet6"
            line = f"{int(interface.ip):032x} 04 {bits:02x} 00 80 {netdev}\n"
        else:
            network, mask = (
                bytes(reversed(part.packed)).hex().upper()
                for part in (interface.network.network_address, interface.network.netmask)
            )
            table = self.root / "proc/net/route"
            line = f"{netdev}\t{network}\t00000000\t0001\t0\t0\t0\t{mask}\t0\t0\t0\n"
        with table.open("a") as file:
            file.write(line)


@pytest.fixture
def rdma_machine(tmp_path: Path) -> RdmaMachine:
    """An empty server: give it adapters."""
    return RdmaMachine(tmp_path / "machine")


@pytest.fixture
def eight_by_eight(rdma_machine: RdmaMachine) -> RdmaMachine:
    """Eight GPUs and eight RoCE adapters of 400 Gb/s, a pair behind each PCIe switch, four switches per socket, and a
    management adapter of 25 Gb/s. GPU n is 0000:n7:00.0 (n from 1), its adapter mlx5_(n - 1)."""
    for index in range(8):
        switch = f"pci0000:{index + 1}4/0000:{index + 1}4:01.0/0000:{index + 1}5:00.0"
        rdma_machine.interface(f"rdma{index}")
        rdma_machine.nic(
            f"mlx5_{index}",
            f"{switch}/0000:{index + 1}6:00.0/0000:{index + 1}8:00.0",
            numa_node=index // 4,
            netdev=f"rdma{index}",
            addresses=("fe80::1/64", f"10.0.{index}.5/24"),
        )
        rdma_machine.pci(f"{switch}/0000:{index + 1}6:01.0/0000:{index + 1}7:00.0", index // 4)
    rdma_machine.interface("eth0", mtu=1500)
    rdma_machine.nic(
        "mlx5_8", "pci0000:04/0000:04:02.0/0000:05:00.0", rate="25 Gb/sec (1X EDR)", netdev="eth0",
        addresses=("192.168.1.5/24",),
    )  # fmt: skip
    return rdma_machine


@pytest.fixture
def tls_settings(tmp_path: Path) -> Callable[..., dict[str, Path]]:
    """`tls_settings("node", ca="ca")`: tls_cert, tls_key and tls_ca, copies of these files of tests/data/tls.

    Called again, it puts others into the same files, unless they are `of` somebody else.
    """

    def provide(name: str = "node", *, ca: str = "ca", key: str = "", of: str = "tls") -> dict[str, Path]:
        folder = tmp_path / of
        folder.mkdir(exist_ok=True)
        given = {"tls_cert": f"{name}.pem", "tls_key": f"{key or name}.key", "tls_ca": f"{ca}.pem"}
        settings = {}
        for setting, source in given.items():
            settings[setting] = folder / f"{setting}.pem"
            fresh = folder / "fresh"
            shutil.copyfile(CERTIFICATES / source, fresh)
            fresh.chmod(0o600)
            fresh.replace(settings[setting])
        return settings

    return provide
