"""Compiles kernels for the types of the models that tests serve, before several processes of tests do so at once.

    python -m tests.compile_kernels

Installation compiles those of the bundled model only.
"""

import tempfile
import time
from pathlib import Path

import torch

from engine import SamplingRow, load_model, sample
from engine.random_model import write_random_model
from tests.served_models import PLAIN, SMALL_KV, TWO_GROUPS, WINDOWS_ONLY


def main() -> None:
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number, spec in enumerate((PLAIN, TWO_GROUPS, SMALL_KV, WINDOWS_ONLY)):
            load_model(write_random_model(Path(folder) / str(number), spec), threads=1).warm_up()
    scores = torch.zeros((1, 8), dtype=torch.float64)  # as the judge of tokens has them
    sample(scores, [SamplingRow(temperature=1.0, top_p=0.5, top_k=1, seed=0, choice=0, index=0, min_p=0.5)])
    print(f"the tests' kernels compiled in {time.monotonic() - began_s:.1f} s")


if __name__ == "__main__":
    main()
