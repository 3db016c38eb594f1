"""The paced engine: real slots, KV bytes and protocol, with the delays of a cost profile instead of compute.

Its KV and tokens depend only on the preceding ids, as a model's do, so any fault between two nodes appears as KV that
does not match its ids, or as a wrong token. The transformer engine never imports this package; it imports no torch.
"""
