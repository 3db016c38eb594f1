"""Warm-up compiles all there is: a compiler that starts in mid-service stops every request for seconds."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import numpy as np
from engine import ForwardBatch, SamplingRow, SequenceChunk, kernels, load_model, sample, sampling_kernels

def compiled():
    found = (f for module in (kernels, sampling_kernels) for f in vars(module).values())
    return {f.__name__: len(f.signatures) for f in found if hasattr(f, "signatures")}

def chunk(tokens, start, slots, every=False):
    return SequenceChunk(np.full(tokens, 7, np.int32), start, (np.array(slots, np.int32),), True, every)

def row(**how):
    return SamplingRow(**({"temperature": 0.7, "top_p": 1.0, "top_k": 0, "seed": 1, "choice": 3, "index": 9} | how))

model = load_model(sys.argv[1], threads=1)
model.warm_up()
warm = compiled()
cache = model.new_cache((64,), 8)
model.forward(ForwardBatch([chunk(100, 0, range(13)), chunk(40, 0, range(20, 25)), chunk(1, 0, [31])]), cache)
model.forward(ForwardBatch([chunk(60, 100, range(20)), chunk(1, 1, [31])]), cache)
model.forward(ForwardBatch([chunk(9, 40, range(20, 27), every=True)]), cache)
logits = model.forward(ForwardBatch([chunk(1, 2, [31])]), cache)
for how in ({}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"min_p": 0}):
    sample(logits, [row(**how)])
assert warm and compiled() == warm, (warm, compiled())
"""


def test_mixed_steps_compile_nothing_that_warm_up_did_not() -> None:
    model = Path(__file__).parents[2] / "moonpool" / "data" / "model"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model)], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
