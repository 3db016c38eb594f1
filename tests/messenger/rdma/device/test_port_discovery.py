"""The ports as the kernel's files show them, against what the verbs themselves tell, and what is chosen of them."""

from typing import Any

import pytest
import pyverbs.enums as verbs
from pyverbs.device import Context

from messenger.rdma.policy.facts import PATH_MTUS, DeviceFacts
from messenger.rdma.policy.rail_choice import RailRequest, choose
from messenger.rdma.topology import rdma_ports

pytestmark = [pytest.mark.transports("rdma"), pytest.mark.usefixtures("transport")]


@pytest.fixture
def port(rail: Any) -> DeviceFacts:
    (found,) = (port for port in rdma_ports() if port.name == rail.device)
    return found


def test_state_lid_mtu_and_gids_are_those_that_the_verbs_tell(port: DeviceFacts) -> None:
    with Context(name=port.name) as context:
        told = context.query_port(port.port)
        assert (port.state == "ACTIVE") == (told.state == verbs.IBV_PORT_ACTIVE)
        assert (port.lid, port.active_mtu) == (told.lid, PATH_MTUS[told.active_mtu - 1])
        assert port.gids
        for gid in port.gids:
            assert gid.address.exploded == str(context.query_gid(port.port, gid.index))


def test_every_soft_roce_port_becomes_a_rail_by_its_ipv4_address_and_subnet(port: DeviceFacts, rail: Any) -> None:
    (chosen,) = (each for each in choose(rdma_ports(), RailRequest()).rails if each.device == port.name)
    assert (chosen.address, chosen.prefix_bits, chosen.is_spare) == (rail.address, 96 + 24, False)
