"""The recipe of the bundled model: sources, tokenizer, windows, training, export and evaluation.

Nothing that serves a request may import from here; the package is not part of the wheel.
Run each step from the repository root: ``python -m training.prepare``, ``training.train``, ``training.export``,
``training.evaluate`` and ``training.plot``.
"""
