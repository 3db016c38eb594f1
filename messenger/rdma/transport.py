"""The rdma transport: connects like tcp, then goes on over rails. Nothing of pyverbs is imported before it is made."""

import logging
import socket
from dataclasses import replace

from messenger.buffered import BufferedLink
from messenger.config import Endpoint, MessengerConfig
from messenger.counters import Counters
from messenger.errors import RdmaUnavailable
from messenger.link import Link
from messenger.memory import Region
from messenger.rdma.adoption import Adoption
from messenger.rdma.link import RdmaLink
from messenger.rdma.policy.choice import Wish, choose
from messenger.rdma.policy.facts import Rail
from messenger.rdma.requester import RdmaRequester
from messenger.rdma.responder import RdmaResponder
from messenger.rdma.topology import bound_place, rdma_ports
from messenger.rdma.verbs.device import Device, require_pyverbs
from messenger.tcp.transport import TcpTransport
from messenger.transport import Requester, Responder, Transport

_log = logging.getLogger(__name__)


class RdmaTransport(Transport):
    """Holds the devices until `close`."""

    name = "rdma"

    def __init__(self, config: MessengerConfig, tcp: TcpTransport, counters: Counters) -> None:
        """Raises RdmaUnavailable: no pyverbs, no port that fits, or a device that cannot be used."""
        choice = choose(rdma_ports(), Wish(devices=config.rdma_devices, memory=bound_place()))
        if not choice.rails:
            raise RdmaUnavailable(f"no RDMA port can be used: {choice.why_none}")
        require_pyverbs()
        self._tcp = tcp
        self._devices: dict[str, Device] = {}
        rails: list[Rail] = []
        try:
            for rail in choice.rails:
                device = self._devices.get(rail.device) or Device(rail.device, counters)
                self._devices[rail.device] = device
                rails.append(rail if rail.mtu else replace(rail, mtu=device.port_mtu(rail.port)))
        except BaseException:
            self.close()
            raise
        for verdict in choice.verdicts:
            _log.info("rdma: %s", verdict.text)
        self._adoption = Adoption(rails, self._devices, counters, config.handshake_timeout_s)

    def address_of(self, endpoint: Endpoint) -> str:
        return self._tcp.address_of(endpoint)

    def new_socket(self, endpoint: Endpoint) -> socket.socket:
        return self._tcp.new_socket(endpoint)

    def wrap(self, sock: socket.socket, address: str) -> BufferedLink:
        return self._tcp.wrap(sock, address)

    def connect(self, sock: socket.socket, endpoint: Endpoint) -> None:
        self._tcp.connect(sock, endpoint)

    def adopt(self, link: Link, *, caller: bool) -> Link:
        assert isinstance(link, BufferedLink)
        return self._adoption.call(link) if caller else self._adoption.answer(link)

    def requester(self, link: Link) -> Requester:
        return RdmaRequester(_of_rails(link))

    def responder(self, link: Link) -> Responder:
        return RdmaResponder(_of_rails(link))

    def deregister(self, region: Region) -> None:
        for device in self._devices.values():
            device.deregister(region)

    def close(self) -> None:
        for device in self._devices.values():
            device.close()
        self._devices.clear()


def _of_rails(link: Link) -> RdmaLink:
    assert isinstance(link, RdmaLink)
    return link
