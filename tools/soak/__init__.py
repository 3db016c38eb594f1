"""Soak test of the messenger: load and faults for any duration (`python -m tools.soak`), and the proxy that injects
faults.

A development tool, not shipped. It uses only the messenger's public names, except in `rails.py`, and needs no compiled
code.
"""
