"""Figures of docs/performance.md and tables of docs/guarantees.md, generated from stored results."""
