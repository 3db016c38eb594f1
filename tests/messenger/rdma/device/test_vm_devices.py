"""Guarantee of the test VM: every rail has a device that carries RDMA writes."""

import time
from typing import Any

import numpy as np
import pytest
import pyverbs.enums as verbs
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

pytestmark = [pytest.mark.transports("rdma"), pytest.mark.usefixtures("transport")]

PORT = 1
NBYTES = 1 << 20


def _gid_index(context: Any, address: str) -> int:
    octets = [int(octet) for octet in address.split(".")]
    wanted = f"0000:0000:0000:0000:0000:ffff:{octets[0]:02x}{octets[1]:02x}:{octets[2]:02x}{octets[3]:02x}"
    gids = [str(context.query_gid(PORT, index)) for index in range(context.query_port(PORT).gid_tbl_len)]
    assert wanted in gids, gids
    return gids.index(wanted)


def test_the_device_is_up_and_takes_packets_of_4096_bytes(rail: Any) -> None:
    with Context(name=rail.device) as context:
        port = context.query_port(PORT)
        assert (port.state, port.active_mtu) == (verbs.IBV_PORT_ACTIVE, verbs.IBV_MTU_4096)
        _gid_index(context, rail.address)


def test_bytes_written_by_one_queue_pair_arrive_in_anothers_memory(rail: Any) -> None:
    source = np.random.default_rng(7).integers(0, 256, NBYTES, dtype=np.uint8)
    target = np.zeros(NBYTES, dtype=np.uint8)
    access = verbs.IBV_ACCESS_LOCAL_WRITE | verbs.IBV_ACCESS_REMOTE_WRITE
    with Context(name=rail.device) as context, PD(context) as domain, CQ(context, 16) as completions:
        index = _gid_index(context, rail.address)
        wanted = QPInitAttr(
            qp_type=verbs.IBV_QPT_RC,
            scq=completions,
            rcq=completions,
            cap=QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1),
        )
        regions = [MR(domain, NBYTES, access, address=array.ctypes.data) for array in (source, target)]
        pairs = [QP(domain, wanted) for _ in regions]
        for pair, other in zip(pairs, reversed(pairs), strict=True):
            route = GlobalRoute(dgid=GID(str(context.query_gid(PORT, index))), sgid_index=index, hop_limit=64)
            attributes = QPAttr(port_num=PORT)
            attributes.qp_access_flags = access
            attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=PORT)
            attributes.path_mtu = verbs.IBV_MTU_4096
            attributes.dest_qp_num = other.qp_num
            attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
            attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = 20, 7, 7
            pair.to_rts(attributes)
        piece = SGE(source.ctypes.data, NBYTES, regions[0].lkey)
        request = SendWR(num_sge=1, sg=[piece], opcode=verbs.IBV_WR_RDMA_WRITE, send_flags=verbs.IBV_SEND_SIGNALED)
        request.set_wr_rdma(regions[1].rkey, target.ctypes.data)
        pairs[0].post_send(request)
        number, done, end_s = 0, [], time.monotonic() + 60
        while not number and time.monotonic() < end_s:
            number, done = completions.poll()
        assert [completion.status for completion in done] == [verbs.IBV_WC_SUCCESS]
        np.testing.assert_array_equal(target, source)
        for resource in (*pairs, *regions):
            resource.close()
