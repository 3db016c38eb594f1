"""Creation of an RdmaLink from a greeted socket, on both sides."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from messenger.counters import Counters
from messenger.frames import VERSION
from messenger.link import BufferedLink
from messenger.rdma import handshake
from messenger.rdma.lane import Lane
from messenger.rdma.link import RdmaLink
from messenger.rdma.memory import FrameMemory
from messenger.rdma.policy.facts import Rail
from messenger.rdma.policy.rail_choice import pair, pair_mtu
from messenger.rdma.verbs.device import Device
from messenger.rdma.verbs.queue_pair import RemoteQueuePair
from messenger.transport import NoPath


@dataclass(frozen=True)
class LinkSetup:
    """Maker of links from this process's rails and their devices by name."""

    rails: Sequence[Rail]
    devices: Mapping[str, Device]
    counters: Counters
    timeout_s: float

    def call(self, sock: BufferedLink) -> RdmaLink:
        """Set up the link as the caller. Raises NoPath, ProtocolError or OSError; `sock` must then be closed."""
        nonce = handshake.new_nonce()
        rails = handshake.packed_rails(self.rails)
        handshake.send(sock, handshake.HandshakeOffer(VERSION, handshake.fingerprint(), nonce, rails))
        answer = handshake.receive(sock, handshake.HandshakeReply)
        remote_rails, pairs = handshake.check_answer(answer, nonce, len(self.rails))
        ends = handshake.check_ends(answer, len(pairs))
        memory, lanes = self._lanes([mine for mine, _ in pairs])
        try:
            handshake.send(sock, handshake.HandshakeConfirm(answer.nonce, memory.address, _ends(lanes)))
            _connect(lanes, [remote_rails[theirs] for _, theirs in pairs], ends)
            handshake.check_nonce(handshake.receive(sock, handshake.HandshakeReady).your_nonce, nonce)
            link = RdmaLink(sock, lanes, memory, answer.inbox_address, self.counters, caller=True)
        except BaseException:
            _give_up(lanes)
            raise
        try:
            link.probe(self.timeout_s)
        except BaseException:
            link.close(reset=True)
            raise
        return link

    def answer(self, sock: BufferedLink) -> RdmaLink:
        """Set up the link as the owner. Raises as `call`; the reason is sent to the caller if possible."""
        opening = handshake.receive(sock, handshake.HandshakeOffer)
        nonce = handshake.new_nonce()
        try:
            remote_rails = handshake.check_opening(opening)
            pairs = pair(remote_rails, self.rails)
            if not pairs:
                raise NoPath("no rail of one side reaches one of the other: link types or address families differ")
            memory, lanes = self._lanes([mine for _, mine in pairs])
        except OSError as error:
            with contextlib.suppress(OSError):
                handshake.send(sock, handshake.HandshakeRefusal(str(error)))
            raise
        try:
            rails, paired = handshake.packed_rails(self.rails), [list(both) for both in pairs]
            reply = handshake.HandshakeReply(opening.nonce, nonce, rails, paired, memory.address, _ends(lanes))
            handshake.send(sock, reply)
            confirm = handshake.receive(sock, handshake.HandshakeConfirm)
            handshake.check_nonce(confirm.your_nonce, nonce)
            _connect(lanes, [remote_rails[theirs] for theirs, _ in pairs], handshake.check_ends(confirm, len(pairs)))
            link = RdmaLink(sock, lanes, memory, confirm.inbox_address, self.counters, caller=False)
        except BaseException:
            _give_up(lanes)
            raise
        try:
            handshake.send(sock, handshake.HandshakeReady(opening.nonce))
        except BaseException:
            link.close(reset=True)
            raise
        return link

    def _lanes(self, places: Sequence[int]) -> tuple[FrameMemory, list[Lane]]:
        memory = FrameMemory()
        lanes: list[Lane] = []
        try:
            for place in places:
                rail = self.rails[place]
                lanes.append(Lane(self.devices[rail.device], rail, memory))
        except BaseException:
            _give_up(lanes)
            raise
        return memory, lanes


def _connect(lanes: Sequence[Lane], remote_rails: Sequence[Rail], ends: Sequence[tuple[RemoteQueuePair, int]]) -> None:
    for lane, remote_rail, (remote, rkey) in zip(lanes, remote_rails, ends, strict=True):
        lane.connect(remote_rail, remote, rkey, pair_mtu(lane.rail, remote_rail))


def _ends(lanes: Sequence[Lane]) -> list[handshake.End]:
    return [lane.end for lane in lanes]


def _give_up(lanes: Sequence[Lane]) -> None:
    with contextlib.ExitStack() as rest:
        for lane in lanes:
            rest.callback(lane.close)
            rest.callback(lane.pair.fail)
