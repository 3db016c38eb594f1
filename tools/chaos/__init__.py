"""Chaos test (`python -m tools.chaos`, `make chaos`): a live cluster under mixed load and random faults.

Every answer is verified, and at the end nothing may be held anywhere. Development tool, not shipped. Files in the order
of a run: `schedule.py` draws the faults from the seed (pure), `cluster.py` runs the roles, each in its own network
namespace of `network.py`, `faults.py` injects and heals, `load.py` sends requests as a sensible client would,
`verify.py` judges the answers, `leaks.py` what is left, and `report.py` writes JSON and a page. `preload.c` gives a
process a wrong clock and a failing disk.
"""
