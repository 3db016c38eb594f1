"""The implementations of a forward step, behind one registry (`registry.py`).

`compiled.py` is numba kernels for CPUs. `tensors.py` is plain torch operations on any device; its attention is one of
`gathered_attention.py`, `triton_attention.py` and `flash_attention.py`.
"""
