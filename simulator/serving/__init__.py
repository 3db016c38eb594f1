"""Simulation of a whole cluster under virtual time: the live conductor's policy object and the nodes' own pure
policies, driven by the events of a live cluster. Contains the clock, the event heap and the actual costs of work, but
no policy."""
