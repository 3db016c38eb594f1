"""Compiled loops that move the messenger's bytes without the GIL. Imported on demand: importing numba is slow."""
