"""A bed for tests that need a real verbs device: a small Debian VM with soft-RoCE devices, built and booted here.

Nothing of the serving system may live here and nothing here is shipped: `python -m tools.rdma_vm run -- COMMAND` runs a
command inside the VM, with the repository at the path it has outside. README.md tells how to use it.
"""
