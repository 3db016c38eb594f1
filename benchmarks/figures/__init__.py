"""Figures of README.md and docs/performance.md, generated from the stored results of benchmarks."""
