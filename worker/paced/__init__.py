"""The paced engine: real slots, real KV bytes and the real protocol, with a cost profile's delays in place of compute.

Its KV and its tokens follow from the ids before them alone, as a model's do: so whatever goes wrong between two nodes
shows as KV that is not what its ids give, or as a wrong token. Never imported by the engine that computes; no torch.
"""
