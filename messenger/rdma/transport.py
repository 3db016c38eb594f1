"""The rdma transport: connects like tcp, then uses rails. It imports pyverbs only when it is created."""

import logging
import socket
import time
from dataclasses import replace

from messenger.config import Endpoint, MessengerConfig
from messenger.counters import Counters
from messenger.errors import ProtocolError, RdmaUnavailable
from messenger.link import BufferedLink, Link
from messenger.memory import AnyRegion, GpuRegion
from messenger.rdma import gpu_memory
from messenger.rdma.link import RdmaLink
from messenger.rdma.link_setup import LinkSetup
from messenger.rdma.policy.facts import Rail
from messenger.rdma.policy.rail_choice import RailRequest, choose
from messenger.rdma.requester import RdmaRequester
from messenger.rdma.responder import RdmaResponder
from messenger.rdma.topology import rdma_ports
from messenger.rdma.verbs.device import REGION_ACCESS, Device, require_pyverbs
from messenger.tcp.transport import TcpTransport
from messenger.transport import NoPath, Requester, Responder, Transport

_GIVEN_UP_S = 30.0

_log = logging.getLogger(__name__)


class RdmaTransport(Transport):
    """Transport over RDMA devices, held open until `close`."""

    name = "rdma"

    def __init__(self, config: MessengerConfig, tcp: TcpTransport, counters: Counters) -> None:
        """Choose and open the devices. Raises RdmaUnavailable without pyverbs, a suitable port or a usable device."""
        choice = choose(
            rdma_ports(), RailRequest(devices=config.transport.rdma_devices, memory=gpu_memory.place_of(config.gpu))
        )
        if not choice.rails:
            raise RdmaUnavailable(f"no RDMA port can be used: {choice.why_none}")
        require_pyverbs()
        self._tcp = tcp
        self._counters = counters
        self._is_only = config.transport.transport == "rdma"
        self._given_up: dict[str, float] = {}
        self._devices: dict[str, Device] = {}
        rails: list[Rail] = []
        try:
            for rail in choice.rails:
                device = self._devices.get(rail.device) or Device(
                    rail.device, counters, config.transport.rdma_silence_s
                )
                self._devices[rail.device] = device
                rails.append(rail if rail.mtu else replace(rail, mtu=device.port_mtu(rail.port)))
        except BaseException:
            self.close()
            raise
        for verdict in choice.verdicts:
            _log.info("rdma: %s", verdict.text)
        self._link_setup = LinkSetup(rails, self._devices, counters, config.handshake_timeout_s)

    def address_of(self, endpoint: Endpoint) -> str:
        return self._tcp.address_of(endpoint)

    def new_socket(self, endpoint: Endpoint) -> socket.socket:
        return self._tcp.new_socket(endpoint)

    def wrap(self, sock: socket.socket, address: str) -> BufferedLink:
        return self._tcp.wrap(sock, address)

    def connect(self, sock: socket.socket, endpoint: Endpoint) -> None:
        peer = f"{endpoint.node_id} at {self.address_of(endpoint)}"
        if self._given_up.get(peer, 0.0) > time.monotonic():
            raise NoPath(f"{peer} could not be reached by rdma less than {_GIVEN_UP_S:g} s ago")
        self._tcp.connect(sock, endpoint)

    def adopt(self, link: Link, *, caller: bool) -> Link:
        assert isinstance(link, BufferedLink)
        if not caller:
            return self._link_setup.answer(link)
        try:
            return self._link_setup.call(link)
        except (ProtocolError, OSError) as error:
            if isinstance(error, ConnectionError | TimeoutError) and not isinstance(error, NoPath):
                raise  # an error of the socket, not of the rails
            self._give_up(link.address, str(error))
            raise NoPath(str(error)) from error

    def requester(self, link: Link) -> Requester:
        return RdmaRequester(_of_rails(link), lambda reason: self._give_up(link.address, reason))

    def responder(self, link: Link) -> Responder:
        return RdmaResponder(_of_rails(link))

    def register_gpu(self, region: GpuRegion) -> None:
        devices = list(self._devices.values())
        started_s = time.monotonic()
        pds = [device.pd for device in devices]
        way, found = gpu_memory.register(pds, region.memory, REGION_ACCESS, driver=gpu_memory.CudaDriver())
        took_s = (time.monotonic() - started_s) / len(devices)
        for device, registered in zip(devices, found, strict=True):
            device.keep(region, registered, took_s)
        _log.info("GPU memory of %d bytes is registered for rdma by %s", region.nbytes, way.value)

    def deregister(self, region: AnyRegion) -> None:
        for device in self._devices.values():
            device.deregister(region)

    def _give_up(self, peer: str, reason: str) -> None:
        """Use other transports for this peer for 30 s, if there are any."""
        self._counters.add("rdma_given_up")
        now_s = time.monotonic()
        if peer not in self._given_up:
            _log.warning("rdma is not used towards %s for %g s: %s", peer, _GIVEN_UP_S, reason)
        if not self._is_only:
            self._given_up = {one: until_s for one, until_s in self._given_up.items() if until_s > now_s}
            self._given_up[peer] = now_s + _GIVEN_UP_S

    def close(self) -> None:
        for device in self._devices.values():
            device.close()
        self._devices.clear()


def _of_rails(link: Link) -> RdmaLink:
    assert isinstance(link, RdmaLink)
    return link
