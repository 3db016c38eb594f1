"""The rdma transport: one-sided moves by RDMA verbs.

Only the modules that speak verbs import pyverbs, and they are imported only when rdma is chosen or looked for.
"""
