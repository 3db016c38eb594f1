"""Deterministic simulation of the production roles: one process, virtual time, seeded threads, network, disks, crashes.

The code of the roles runs unmodified. Its modules are loaded with replacements of the modules through which they reach
the world: `time`, `threading`, `concurrent.futures`, `queue`, `secrets`, `uuid`, `socket`, `select`, `grpc` (see
`imports.py`). The approach is that of FoundationDB (Zhou et al., "FoundationDB: A Distributed Unbundled Transactional
Key Value Store", SIGMOD 2021, section 4).
"""
