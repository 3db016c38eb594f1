"""The messenger: one per process. Owns the regions and grants, listens for peers, and connects to them."""

import logging
import os
import secrets
import threading
from collections.abc import Callable
from typing import overload

from messenger.alarms import AlarmClock
from messenger.config import Endpoint, MessengerConfig, boot_id
from messenger.counters import CERTIFICATE_LEFT, Counters, FlowTotals, reported
from messenger.dialing import Dialer
from messenger.errors import GpuMemoryUnsupported, MessengerClosed, RdmaUnavailable
from messenger.frames import MAX_NODE_ID_CHARS, is_node_id
from messenger.grants import GrantTable
from messenger.inbound import Owner
from messenger.memory import AnyRegion, GpuMemory, GpuRegion, Region, RemoteKey, SharedMemory
from messenger.peer import Peer, roles
from messenger.priority import Priority, Road
from messenger.rdma.topology import rdma_ports
from messenger.server import Server
from messenger.sessions import SessionTable
from messenger.shm.transport import ShmTransport
from messenger.stream import Stream
from messenger.tcp.transport import TcpTransport
from messenger.traffic import Traffic
from messenger.transport import Transport
from rpc.errors import InvalidArgument
from rpc.tls import identity

NotifyHandler = Callable[[str, bytes, bytes], None]
PeerLostHandler = Callable[[str, int], None]

_MAX_SPENT_PEERS = 256
_MAX_LOST = 4096

_log = logging.getLogger(__name__)


class Messenger:
    """Safe to use from any thread, and from asyncio: no call blocks on a peer, except `revoke`, `deregister` (at most
    for the grace and the end of what is under way) and `close`. Handlers run on messenger threads and must be brief.
    """

    def __init__(self, config: MessengerConfig, *, node_id: str, incarnation: int) -> None:
        if not is_node_id(node_id) or not 0 <= incarnation < 1 << 64:
            raise InvalidArgument(
                f"node {node_id!r} of incarnation {incarnation} is no identity: expected 1 to {MAX_NODE_ID_CHARS} "
                "printable characters, and a number of 64 bits"
            )
        self._config = config
        self._node_id = node_id
        self._incarnation = incarnation
        self._counters = Counters()
        self._grants = GrantTable()
        self._clock = AlarmClock(f"{node_id}-alarms")
        self._road = Road()
        self._notify_handlers: list[NotifyHandler] = []
        self._lost_handlers: list[PeerLostHandler] = []
        self._lock = threading.Lock()
        self._peers: dict[Endpoint, Peer] = {}
        self._lost: dict[tuple[str, int], None] = {}  # the longest lost first
        self._transports: dict[str, Transport] = {}
        self._endpoint: Endpoint | None = None
        self._closed = False
        owner = Owner(
            node_id=node_id,
            incarnation=incarnation,
            handshake_timeout_s=config.handshake_timeout_s,
            grants=self._grants,
            sessions=SessionTable(),
            counters=self._counters,
            deliver=self._deliver,
        )
        self._server = Server(
            owner,
            self._clock,
            max_connections=config.max_connections,
            max_connections_per_peer=config.max_connections_per_peer,
            loss_grace_s=config.peer_loss_grace_s,
            on_lost=self._peer_lost,
            on_found=self._peer_found,
        )

    def start(self) -> Endpoint:
        """Listen; returns where. Raises AddressInUse or BindFailed, and is closed then."""
        if self._endpoint is not None or self._closed:
            raise InvalidArgument("a messenger is started once")
        config = self._config
        self._clock.start()
        tcp_host, tcp_port, shm_socket = "", 0, ""
        try:
            if config.transport != "shm":
                tcp = TcpTransport(config)
                spoken = self._spoken_at(tcp)
                self._transports |= spoken
                tcp_host = config.advertise_host or config.listen_host
                tcp_port = self._server.listen(tcp, spoken).getsockname()[1]
            if config.transport in ("auto", "shm"):
                shm = self._transports["shm"] = ShmTransport(config.run_dir, self._node_id)
                self._grants.page()
                self._server.listen(shm, {"shm": shm})
                shm_socket = os.fspath(shm.path)
        except BaseException:
            self.close()
            raise
        host_id = config.host_id if config.host_id is not None else boot_id()
        self._endpoint = Endpoint(
            self._node_id, self._incarnation, host_id, tcp_host, tcp_port, shm_socket, "rdma" in self._transports
        )
        return self._endpoint

    def close(self) -> None:
        """Fail what is pending, disconnect, end the threads. Regions stay their memory's owner's. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()
        self._server.close()
        self._grants.close()
        self._clock.close()
        for transport in self._transports.values():
            transport.close()

    @property
    def endpoint(self) -> Endpoint:
        """Where this messenger listens."""
        if self._endpoint is None:
            raise InvalidArgument("the messenger has not been started")
        return self._endpoint

    @overload
    def register(self, memory: SharedMemory) -> Region: ...
    @overload
    def register(self, memory: GpuMemory) -> GpuRegion: ...
    def register(self, memory: SharedMemory | GpuMemory) -> AnyRegion:
        """Make memory usable as source, destination and, by grants, for peers.

        GPU memory is moved by rdma alone, straight between adapter and GPU (see rdma/gpu_memory.py), once this
        messenger was started. Raises GpuMemoryUnsupported, naming what is missing, where that cannot be: then keep a
        copy in host memory and register that. Towards a peer that rdma does not reach its transfers end with
        MemoryOutOfReach, and peers that come by tcp or shm are refused.
        """
        if isinstance(memory, SharedMemory):
            return self._grants.register(memory)
        transport = self._transports.get("rdma")
        if transport is None:
            spoken = ", ".join(self._transports) or "nothing before it is started"
            raise GpuMemoryUnsupported(
                f"GPU memory is reached by rdma alone, and this messenger speaks {spoken}: give it rdma, or register "
                "host memory and copy"
            )
        region = self._grants.register_gpu(memory)
        try:
            transport.register_gpu(region)
        except BaseException:
            self.deregister(region)
            raise
        return region

    def deregister(self, region: AnyRegion) -> None:
        """Revoke all grants of the region and forget it. Own operations under way keep the mapping until they end."""
        self._grants.deregister(region, self._config.revoke_grace_s)
        for transport in self._transports.values():
            transport.deregister(region)

    def grant(self, region: AnyRegion, offset: int, nbytes: int, *, read: bool, write: bool) -> RemoteKey:
        """Let whoever has the key read or write bytes [offset, offset + nbytes) of the region."""
        return self._grants.grant(region, offset, nbytes, read=read, write=write)

    def revoke(self, key: RemoteKey) -> None:
        """Void the key. When this returns, no operation under it can touch the memory any more, on any transport.

        Transfers in flight get the configured grace to finish, then their connections are cut: see grants.py.
        """
        self._grants.revoke(key, self._config.revoke_grace_s)

    def connect(self, endpoint: Endpoint) -> Peer:
        """The peer, by the best transport both sides have; cached, and connected at its first operation.

        Shared memory is chosen where the peer's socket is in sight; should it vanish, connections are made by tcp.

        Raises InvalidArgument when there is no transport in common.
        """
        with self._lock:
            if self._closed or self._endpoint is None:
                raise MessengerClosed("the messenger is not running")
            peer = self._peers.get(endpoint)
            if peer is None:
                self._forget_spent_peers()
                peer = self._peers[endpoint] = self._new_peer(endpoint)
            return peer

    def on_notify(self, handler: NotifyHandler) -> None:
        """Call `handler(peer_node_id, tag, payload)` for each notification, in order per peer; before `start`."""
        self._notify_handlers.append(handler)

    def on_peer_lost(self, handler: PeerLostHandler) -> None:
        """Call `handler(node_id, incarnation)` once when a peer's process is found gone or unreachable."""
        self._lost_handlers.append(handler)

    def counters(self) -> dict[str, int]:
        """Totals since the start, and what is open now (names ending in `_open`)."""
        return self._counters.snapshot() | self._held()

    def reported(self) -> dict[str, float]:
        """The same for metrics: by peer, transport, rail and direction, and how long operations took."""
        numbers = reported(self._counters, self._held())
        tls = self._config.tls
        return numbers if tls is None else numbers | {CERTIFICATE_LEFT: identity(tls).left_s()}

    def flows(self) -> list[FlowTotals]:
        """What went which way since the start, by peer, transport, rail and direction."""
        return self._counters.flows()

    def _held(self) -> dict[str, int]:
        regions, grants = self._grants.counts()
        with self._lock:
            peers = list(self._peers.values())
        queued = [peer.queued() for peer in peers]
        return {
            **{f"queued_{one.name.lower()}_open": sum(depths[one] for depths in queued) for one in Priority},
            "regions_open": regions,
            "grants_open": grants,
            "connections_in_open": self._server.connections(),
            "connections_out_open": sum(peer.connections() for peer in peers),
        }

    def validate(self) -> list[str]:
        """Operations pending here and transfers under way in granted memory; empty at rest."""
        with self._lock:
            peers = list(self._peers.values())
        return [*self._grants.problems(), *(problem for peer in peers for problem in peer.problems())]

    def _spoken_at(self, tcp: TcpTransport) -> dict[str, Transport]:
        """The transports for which peers come by tcp. Raises RdmaUnavailable when rdma is asked for by name."""
        config = self._config
        spoken: dict[str, Transport] = {} if config.transport == "rdma" else {"tcp": tcp}
        # Encryption was asked for, and what goes over rails is in the clear: only who names rdma gets it then.
        may_choose = config.transport == "auto" and config.tls is None and bool(config.rdma_devices or rdma_ports())
        if config.transport == "rdma" or may_choose:
            from messenger.rdma.transport import RdmaTransport

            try:
                spoken["rdma"] = RdmaTransport(config, tcp, self._counters)
            except RdmaUnavailable as error:
                if config.transport == "rdma":
                    raise
                _log.warning("rdma is not used: %s", error)
        return spoken

    def _choose(self, endpoint: Endpoint) -> tuple[Transport, ...]:
        chosen = []
        shm = self._transports.get("shm")
        same_host = self._endpoint is not None and endpoint.host_id == self._endpoint.host_id
        # The path may be out of sight, in another container of the same machine.
        if shm is not None and endpoint.shm_socket and same_host and os.path.exists(endpoint.shm_socket):
            chosen.append(shm)
        rdma = self._transports.get("rdma")
        if rdma is not None and endpoint.tcp_port and endpoint.rdma:
            chosen.append(rdma)
        tcp = self._transports.get("tcp")
        if tcp is not None and endpoint.tcp_port:
            chosen.append(tcp)
        if not chosen:
            raise InvalidArgument(
                f"no transport in common with {endpoint}: this side has {', '.join(self._transports)} "
                f"on host {self.endpoint.host_id}"
            )
        return tuple(chosen)

    def _new_peer(self, endpoint: Endpoint) -> Peer:
        transports = self._choose(endpoint)
        identity = (endpoint.node_id, endpoint.incarnation)
        traffic = Traffic(endpoint, self._clock, self._counters, self._road)
        streams = [
            Stream(
                Dialer(
                    transports=transports,
                    endpoint=endpoint,
                    node_id=self._node_id,
                    incarnation=self._incarnation,
                    session=secrets.token_bytes(16),
                    timeout_s=self._config.handshake_timeout_s,
                ),
                traffic,
                role,
                self._counters,
                name=f"{self._node_id}-{endpoint.node_id}-{index}",
                on_lost=lambda reason: self._peer_lost(*identity, reason),
                on_connected=lambda: self._peer_found(*identity),
            )
            for index, role in enumerate(roles(self._config.streams_per_peer))
        ]
        traffic.go_by(streams)
        return Peer(
            endpoint,
            traffic,
            streams,
            default_deadline_s=self._config.default_deadline_s,
            require_region=self._grants.require,
        )

    def _forget_spent_peers(self) -> None:
        if len(self._peers) >= _MAX_SPENT_PEERS:
            for endpoint in [endpoint for endpoint, peer in self._peers.items() if peer.is_spent()]:
                del self._peers[endpoint]
                self._lost.pop((endpoint.node_id, endpoint.incarnation), None)

    def _deliver(self, node_id: str, tag: bytes, payload: bytes) -> None:
        for handler in self._notify_handlers:
            try:
                handler(node_id, tag, payload)
            except Exception:
                _log.exception("a handler failed on notification %r from %s", tag, node_id)

    def _peer_found(self, node_id: str, incarnation: int) -> None:
        with self._lock:
            self._lost.pop((node_id, incarnation), None)

    def _peer_lost(self, node_id: str, incarnation: int, reason: str = "its connections broke") -> None:
        with self._lock:
            if self._closed or (node_id, incarnation) in self._lost:
                return
            self._lost[node_id, incarnation] = None
            if len(self._lost) > _MAX_LOST:
                del self._lost[next(iter(self._lost))]
        _log.warning("lost peer %s of incarnation %#x: %s", node_id, incarnation, reason)
        self._counters.add("peers_lost")
        for handler in self._lost_handlers:
            try:
                handler(node_id, incarnation)
            except Exception:
                _log.exception("a handler failed on the loss of %s", node_id)
