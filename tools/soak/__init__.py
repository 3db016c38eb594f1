"""Soak test of the messenger (`python -m tools.soak`): load and injected faults for any duration.

Development tool, not shipped. It uses only the messenger's public interface, except in `rails.py`, and needs no
compiled code.
"""
