"""The paced engine: real slots, real KV bytes and the real protocol, with the delays of a cost profile instead of
compute.

Its KV and tokens follow from the preceding ids alone, as a model's do, so any fault between two nodes shows as KV that
does not match its ids, or as a wrong token. The transformer engine never imports this package; it imports no torch.
"""
