"""A host that vanishes without a word is noticed by the kernel's timers, whether or not a transfer waits for it."""

from collections.abc import Callable
from typing import Any

import pytest

from messenger import link
from tools.soak.namespaces import TwoHosts

NBYTES = 4 << 20


@pytest.mark.transports("tcp")
@pytest.mark.usefixtures("namespaces")
def test_a_host_that_vanished_is_noticed_while_a_transfer_waits_and_while_nothing_does(
    make_node: Any, make_child: Any, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "DEAD_AFTER_S", 6)
    with TwoHosts() as hosts, hosts.inside(0):
        waiting, idle = (
            make_node(name, NBYTES, data_host=hosts.addresses[0], handshake_timeout_s=1.0)
            for name in ("waiting", "idle")
        )
        b = make_child("b", NBYTES, data_host=hosts.addresses[1], prefix=hosts.command(1))
        peers = [node.messenger.connect(b.endpoint) for node in (waiting, idle)]
        for peer in peers:
            peer.notify(b"t", b"").result()
        owner = make_node("owner", NBYTES, data_host=hosts.addresses[0], peer_loss_grace_s=0.02)
        b.ask(f"call {owner.endpoint_json}")
        for chain in ("INPUT", "OUTPUT"):
            hosts.firewall(1, "-A", chain, "-j", "DROP")
        transfer = peers[0].write(b.key, waiting.region, [[0, 0, NBYTES]], deadline_s=120.0)
        # The deadline is far: nothing but the kernel can have ended these connections, to be made again.
        wait_until(lambda: waiting.messenger.counters().get("failed_connects", 0) > 0, "the transfer's is given up", 40)
        wait_until(lambda: idle.messenger.counters()["connections_out_open"] == 0, "the idle one is given up", 40)
        wait_until(lambda: owner.lost == [("b", 1)], "the owner lets go of the caller's connection", 40)
        assert not transfer.done()
        hosts.heal()
        assert transfer.result().nbytes == NBYTES
        for node in (waiting, idle, owner):
            node.messenger.close()
