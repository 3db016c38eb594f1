"""A decision is made in one go: no kernel of it lets another thread take the interpreter meanwhile."""

import pytest

from conductor.directory.kernels import directory_kernels
from conductor.policy.kernels import prefill_kernels
from conductor.policy.lengths import length_kernels
from conductor.policy.placement.decode import decode_kernels


@pytest.mark.parametrize("family", [prefill_kernels, decode_kernels, length_kernels])
def test_kernels_keep_the_interpreter_and_are_compiled_for_one_signature(family):
    for kernel in family():
        assert not kernel.targetoptions["nogil"]
        assert len(kernel.signatures) == 1


def test_a_match_keeps_the_interpreter_and_changes_of_the_directory_do_not():
    kernels = directory_kernels()
    assert not kernels.match.targetoptions["nogil"]
    assert kernels.store.targetoptions["nogil"]
