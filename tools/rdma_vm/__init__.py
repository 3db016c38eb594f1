"""Test VM with soft-RoCE devices, for tests that need a real verbs device: a small Debian image, built and booted here.

The package imports nothing of the serving system and is not shipped: `python -m tools.rdma_vm run -- COMMAND` runs a
command inside the VM, with the repository at the same path as outside. README.md describes its use.
"""
