"""Compiled loops that move the messenger's bytes without the GIL; numba is imported by what needs it, and when."""
