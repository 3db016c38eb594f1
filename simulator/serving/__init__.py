"""A whole cluster under virtual time: the live conductor's policy object and the nodes' own pure policies, driven by
the events that a live cluster would send. It owns the clock, the event heap and what work truly takes; no policy."""
