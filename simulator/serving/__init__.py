"""Simulation of a whole cluster under virtual time.

Runs the live conductor's policy object and the nodes' pure policies with the events of a live cluster. The package
contains the clock, the event heap and the actual costs of work, but no policy.
"""
