"""The messenger, one per process: owns regions and grants, listens for peers, and connects to them.

Threads: one alarm clock; per listening socket one that accepts; per inbound connection one (`inbound.py`); per stream
of a peer one or two (`stream.py`). Locks, each acquired only before those below it:

    Messenger._lock        the peers, and which of them are lost
    Server._lock           inbound connections and their callers (`server.py`)
    SessionTable._lock     the sessions of callers (`sessions.py`)
    GrantTable._changed    regions, grants and accesses (`grants.py`); revoke cuts connections under it
    Traffic.lock           everything pending towards one peer (`traffic.py`, `stream.py`)
    leaves                 TrafficGate, AlarmClock, Counters, Completion, InboundConnection._cut_lock, links

Handlers and callbacks of futures run without any of these locks.

Lifetimes: regions and grants live until they are deregistered or revoked, or the messenger closes; a Peer until it is
idle and more than `_MAX_IDLE_PEERS` are known; transports until `close` has closed all peers and connections.
"""

import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import overload

from messenger.alarms import AlarmClock
from messenger.config import Endpoint, MessengerConfig, boot_id
from messenger.counters import CERTIFICATE_LEFT, Counters, FlowTotals, reported
from messenger.dialing import Dialer
from messenger.errors import GpuMemoryUnsupported, MessengerClosed, RdmaUnavailable
from messenger.frames import MAX_NODE_ID_CHARS, is_node_id
from messenger.grants import GrantTable
from messenger.inbound import ServerContext
from messenger.memory import AnyRegion, GpuMemory, GpuRegion, Region, RemoteKey, SharedMemory, UnitSection
from messenger.paths import PeerPaths
from messenger.peer import Peer, stream_roles
from messenger.priority import Priority, TrafficGate
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

_MAX_IDLE_PEERS = 256
_MAX_LOST = 4096

_log = logging.getLogger(__name__)


class Messenger:
    """Transfers of bytes between registered memories. Safe to use from any thread, and from asyncio.

    No call blocks on a peer, except `revoke` and `deregister` (at most for the grace period and the end of accesses in
    progress) and `close`. Handlers run on messenger threads and must be brief.
    """

    def __init__(self, config: MessengerConfig, *, node_id: str, incarnation: int) -> None:
        if not is_node_id(node_id) or not 0 <= incarnation < 1 << 64:
            raise InvalidArgument(
                f"node id {node_id!r} with incarnation {incarnation} is invalid: the id must have 1 to "
                f"{MAX_NODE_ID_CHARS} printable characters, and the incarnation must be an unsigned 64-bit number"
            )
        self._config = config
        self._node_id = node_id
        self._incarnation = incarnation
        self._counters = Counters()
        self._grants = GrantTable()
        self._clock = AlarmClock(f"{node_id}-alarms")
        self._gate = TrafficGate()
        self._notify_handlers: list[NotifyHandler] = []
        self._lost_handlers: list[PeerLostHandler] = []
        self._lock = threading.Lock()
        self._peers: dict[Endpoint, Peer] = {}
        self._lost: dict[tuple[str, int], None] = {}  # in the order in which they were lost
        self._transports: dict[str, Transport] = {}
        self._endpoint: Endpoint | None = None
        self._closed = False
        context = ServerContext(
            node_id=node_id,
            incarnation=incarnation,
            handshake_timeout_s=config.handshake_timeout_s,
            grants=self._grants,
            sessions=SessionTable(),
            counters=self._counters,
            deliver=self._deliver,
        )
        self._server = Server(
            context,
            self._clock,
            max_connections=config.max_inbound_connections,
            max_connections_per_peer=config.transport.max_connections_per_peer,
            unproven_s=config.unproven_s,
            loss_grace_s=config.peer_loss_grace_s,
            on_lost=self._peer_lost,
            on_found=self._peer_found,
        )

    def start(self) -> Endpoint:
        """Start to listen and return the endpoint. Raises AddressInUse or BindFailed; the messenger is then closed."""
        if self._endpoint is not None or self._closed:
            raise InvalidArgument("a messenger can be started only once: create another")
        config = self._config
        self._clock.start()
        tcp_host, tcp_port, shm_socket = "", 0, ""
        tcp_paths: tuple[str, ...] = ()
        try:
            if config.transport.transport != "shm":
                tcp = TcpTransport(config)
                accepted = self._transports_over(tcp)
                self._transports |= accepted
                tcp_host = config.host.data_advertise or config.transport.data_host
                tcp_port = self._server.listen(tcp, accepted).getsockname()[1]
                tcp_paths = self._listen_by_paths(accepted, tcp_port)
            if config.transport.transport in ("auto", "shm"):
                shm = self._transports["shm"] = ShmTransport(config.shm_dir, self._node_id)
                self._grants.page()
                self._server.listen(shm, {"shm": shm})
                shm_socket = os.fspath(shm.path)
        except BaseException:
            self.close()
            raise
        host_id = config.host.host_id or boot_id()
        self._endpoint = Endpoint(
            node_id=self._node_id,
            incarnation=self._incarnation,
            host_id=host_id,
            tcp_host=tcp_host,
            tcp_port=tcp_port,
            shm_socket=shm_socket,
            rdma="rdma" in self._transports,
            tcp_paths=tcp_paths,
        )
        return self._endpoint

    def close(self) -> None:
        """Fail everything pending, disconnect and end the threads. Regions' memory stays open. Idempotent."""
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
        """Endpoint at which this messenger listens."""
        if self._endpoint is None:
            raise InvalidArgument("the messenger has not been started")
        return self._endpoint

    @property
    def transports(self) -> tuple[str, ...]:
        """Names of the transports by which peers may reach this messenger; empty before the start."""
        return tuple(self._transports)

    @overload
    def register(self, memory: SharedMemory, *, units: Sequence[UnitSection] = ()) -> Region: ...
    @overload
    def register(self, memory: GpuMemory) -> GpuRegion: ...
    def register(self, memory: SharedMemory | GpuMemory, *, units: Sequence[UnitSection] = ()) -> AnyRegion:
        """Register memory as a source and destination of transfers, and for grants to peers.

        Host memory may have `units`, disjoint sections in ascending order: `Region.units` then has digests of those
        that peers have written whole.

        GPU memory is moved by rdma alone, directly between adapter and GPU (see rdma/gpu_memory.py), and can be
        registered once this messenger was started. Raises GpuMemoryUnsupported with the reason if that is impossible:
        then register a copy in host memory. Transfers of GPU memory towards a peer that rdma does not reach fail with
        MemoryOutOfReach, and accesses by peers that connect by tcp or shm are refused.
        """
        if isinstance(memory, SharedMemory):
            return self._grants.register(memory, units)
        transport = self._transports.get("rdma")
        if transport is None:
            available = ", ".join(self._transports) or "none, since it was not started"
            raise GpuMemoryUnsupported(
                f"GPU memory takes the rdma transport, and this messenger has: {available}. Enable rdma, or register "
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
        """Revoke all grants of the region and remove it. Its mapping is kept until pending operations with it end."""
        self._grants.deregister(region, self._config.revoke_grace_s)
        for transport in self._transports.values():
            transport.deregister(region)

    def grant(self, region: AnyRegion, offset: int, nbytes: int, *, read: bool, write: bool) -> RemoteKey:
        """Return a key with which peers may read or write bytes [offset, offset + nbytes) of the region."""
        return self._grants.grant(region, offset, nbytes, read=read, write=write)

    def revoke(self, key: RemoteKey) -> None:
        """Revoke the key. When this returns, no operation under it can touch the memory, on any transport.

        Transfers in flight get the configured grace period to finish; then their connections are cut. See grants.py.
        """
        self._grants.revoke(key, self._config.revoke_grace_s)

    def connect(self, endpoint: Endpoint) -> Peer:
        """Return the peer, reached by the best transport that both sides have; cached, connected when first used.

        Shared memory is chosen if the peer's unix socket is visible; if that disappears, connections go by tcp.

        Raises InvalidArgument if there is no transport in common.
        """
        with self._lock:
            if self._closed or self._endpoint is None:
                raise MessengerClosed("the messenger was not started, or is closed")
            peer = self._peers.get(endpoint)
            if peer is None:
                self._evict_idle_peers()
                peer = self._peers[endpoint] = self._new_peer(endpoint)
            return peer

    def on_notify(self, handler: NotifyHandler) -> None:
        """Call `handler(peer_node_id, tag, payload)` for each notification, in order per peer. Call before `start`."""
        self._notify_handlers.append(handler)

    def on_peer_lost(self, handler: PeerLostHandler) -> None:
        """Call `handler(node_id, incarnation)` once when a peer's process is gone or unreachable."""
        self._lost_handlers.append(handler)

    def counters(self) -> dict[str, int]:
        """Return totals since the start, and current counts under names that end in `_open`."""
        return self._counters.snapshot() | self._open_counts()

    def reported(self) -> dict[str, float]:
        """Return the counters for metrics: by peer, transport, rail and direction, with operations' latencies."""
        numbers = reported(self._counters, self._open_counts())
        tls = self._config.tls_files
        return numbers if tls is None else numbers | {CERTIFICATE_LEFT: identity(tls).left_s()}

    def flows(self) -> list[FlowTotals]:
        """Return the bytes moved since the start, by peer, transport, rail and direction."""
        return self._counters.flows()

    def _open_counts(self) -> dict[str, int]:
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
            "paths_down_open": sum(peer.paths_down() for peer in peers),
        }

    def validate(self) -> list[str]:
        """Describe pending operations, and transfers in progress in granted memory; empty at rest."""
        with self._lock:
            peers = list(self._peers.values())
        return [*self._grants.problems(), *(problem for peer in peers for problem in peer.problems())]

    def _listen_by_paths(self, accepted: dict[str, Transport], tcp_port: int) -> tuple[str, ...]:
        """Listen on the further addresses of this host. Returns them with their ports.

        A listener on all addresses (a wildcard) serves them already.
        """
        paths = []
        for host in self._config.transport.data_paths:
            port = tcp_port
            if not self._config.listens_everywhere:
                port = self._server.listen(TcpTransport(self._config, host), accepted).getsockname()[1]
            paths.append(f"{host}:{port}")
        return tuple(paths)

    def _transports_over(self, tcp: TcpTransport) -> dict[str, Transport]:
        """Return the transports whose peers connect by tcp.

        Raises RdmaUnavailable if rdma is not available and the configuration names it.
        """
        config = self._config
        accepted: dict[str, Transport] = {} if config.transport.transport == "rdma" else {"tcp": tcp}
        # Traffic over rails is not encrypted: if encryption is configured, rdma must be named explicitly.
        may_choose = (
            config.transport.transport == "auto"
            and config.tls_files is None
            and bool(config.transport.rdma_devices or rdma_ports())
        )
        if config.transport.transport == "rdma" or may_choose:
            from messenger.rdma.transport import RdmaTransport

            try:
                accepted["rdma"] = RdmaTransport(config, tcp, self._counters)
            except RdmaUnavailable as error:
                if config.transport.transport == "rdma":
                    raise
                _log.warning("rdma is not used: %s", error)
        return accepted

    def _choose(self, endpoint: Endpoint) -> tuple[Transport, ...]:
        chosen = []
        shm = self._transports.get("shm")
        same_host = self._endpoint is not None and endpoint.host_id == self._endpoint.host_id
        # The path may be invisible, in another container of the same machine.
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
        traffic = Traffic(endpoint, self._clock, self._counters, self._gate)
        addresses = [f"{one.tcp_host}:{one.tcp_port}" for one in endpoint.by_path()]
        paths, num_homes, num_streams = None, 1, self._config.transport.streams_per_peer
        if len(addresses) > 1 and transports[-1].name == "tcp":
            paths = PeerPaths(addresses, traffic.lock, self._clock, self._counters, name=endpoint.node_id)
            if len(transports) == 1:
                # The owner bounds the connections of one peer; the probes need one, too.
                room = self._config.transport.max_connections_per_peer - 1
                num_homes = max(1, min(len(addresses), room))
                num_streams = max(1, min(num_streams, room // num_homes))
        dialers = [
            Dialer(
                transports=transports,
                endpoint=endpoint,
                node_id=self._node_id,
                incarnation=self._incarnation,
                session=secrets.token_bytes(16),
                timeout_s=self._config.handshake_timeout_s,
                paths=paths,
                home=number // num_streams,
            )
            for number in range(num_streams * num_homes)
        ]
        streams = [
            Stream(
                dialers[index],
                traffic,
                role,
                self._counters,
                name=f"{self._node_id}-{endpoint.node_id}-{index}",
                on_lost=lambda reason: self._peer_lost(*identity, reason),
                on_connected=lambda: self._peer_found(*identity),
            )
            for index, role in enumerate(stream_roles(num_streams, num_homes))
        ]
        traffic.attach_streams(streams)
        if paths is not None:
            paths.attach(streams, dialers[0])
        return Peer(
            endpoint,
            traffic,
            streams,
            default_deadline_s=self._config.default_deadline_s,
            require_region=self._grants.require,
            paths=paths,
        )

    def _evict_idle_peers(self) -> None:
        if len(self._peers) >= _MAX_IDLE_PEERS:
            for endpoint in [endpoint for endpoint, peer in self._peers.items() if peer.is_idle()]:
                del self._peers[endpoint]
                self._lost.pop((endpoint.node_id, endpoint.incarnation), None)

    def _deliver(self, node_id: str, tag: bytes, payload: bytes) -> None:
        for handler in self._notify_handlers:
            try:
                handler(node_id, tag, payload)
            except Exception:
                _log.exception("a handler failed on notification %.32r from %s", tag, node_id)

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
