"""Failure of rails of RDMA connections: a queue pair is put into the error state, as after a port failure.

This is the only module of the soak test that uses internals of the messenger, whose interface cannot break a rail.
"""

import random

from messenger import Messenger
from messenger.rdma.link import RdmaLink

__all__ = ["break_rail"]


def break_rail(messenger: Messenger, rng: random.Random) -> bool:
    """Break one lane of a random connection; return False if there is none."""
    links = _links(messenger)
    return bool(links) and _break(rng.choice(links), rng)


def _links(messenger: Messenger) -> list[RdmaLink]:
    called = [stream._link for peer in list(messenger._peers.values()) for stream in peer._streams]
    accepted = [connection._link for connection in list(messenger._server._connections)]
    return [link for link in (*called, *accepted) if isinstance(link, RdmaLink)]


def _break(link: RdmaLink, rng: random.Random) -> bool:
    from pyverbs.qp import QPAttr

    from messenger.rdma.verbs import abi

    with link._changed:
        whole = [lane.pair for lane in link.lanes if lane.pair.is_usable]
        if link._failure is not None or not whole:
            return False
        rng.choice(whole)._qp.modify(QPAttr(qp_state=abi.QPS_ERR), abi.QP_STATE)
        return True
