"""Training of the bundled model: sources, tokenizer, windows, training, export and evaluation.

Development tool: it is not part of the wheel and the serving code must not import it. Run each step from the repository
root with ``python -m``: ``tools.training.prepare``, ``tools.training.train``, ``tools.training.export``,
``tools.training.evaluate`` and ``tools.training.plot``.
"""
