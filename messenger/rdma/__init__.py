"""The rdma transport: one-sided transfers by RDMA verbs.

Only the modules that use verbs import pyverbs, and they are imported only when rdma is chosen or detected.

    transport.py, link_setup.py, handshake.py   from a greeted tcp socket to a link over rails
    link.py                                     threads, locks and waiting
    connection_io.py, inbox.py, memory.py       batches, frames and credits of one connection
    lane.py, lane_repair.py, liveness_watch.py  one rail of a connection; its failure and repair
    requester.py, responder.py, windows.py      the caller's and the owner's side of requests
    policy/                                     decisions: choice of rails, scheduling, credits
    verbs/                                      libibverbs
"""
