"""Access to libibverbs: devices, registrations, queue pairs and completions.

Besides this package, only `messenger.rdma.windows` and `messenger.rdma.gpu_memory` import pyverbs.
"""
