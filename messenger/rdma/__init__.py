"""The rdma transport: one-sided moves by RDMA verbs. Only the verbs shell imports pyverbs, and only when rdma is used."""
