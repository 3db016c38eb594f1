"""The recipe of the bundled model: sources, tokenizer, windows, training, export and evaluation.

Nothing that serves a request may import from here; the package is not part of the wheel.
Run each step from the repository root with ``python -m``: ``tools.training.prepare``, ``tools.training.train``,
``tools.training.export``, ``tools.training.evaluate`` and ``tools.training.plot``.
"""
