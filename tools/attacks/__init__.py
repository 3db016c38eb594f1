"""Attacks on a running cluster, by clients, network peers and local users: one module per family.

Used by `tests/security`, which judges each attack by what a second tenant experiences, and by `benchmarks/hostile.py`,
which measures it. Every attack is bounded in bytes, connections and time, and only reaches the cluster it is given.
"""
