"""Load and faults for the messenger, for as long as one likes: `python -m soak`; and the proxy that makes the faults.

A tool of the project, not shipped: it knows the messenger by what its package exports, but for `rails.py`, and needs no
compiled code.
"""
