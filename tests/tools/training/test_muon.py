"""The batched optimiser."""

import pytest
import torch

from tools.training.muon import Muon, orthogonalised


@pytest.mark.parametrize(("rows", "columns"), [(24, 40), (40, 24), (32, 32)])
def test_singular_values_become_about_one(rows: int, columns: int) -> None:
    matrices = torch.randn(3, rows, columns, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalised(matrices))
    assert float(values.quantile(0.1)) > 0.6
    assert float(values.max()) < 1.3


def test_steps_are_those_of_torchs_muon_up_to_its_bfloat16() -> None:
    generator = torch.Generator().manual_seed(2)
    ours = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((64, 32), (32, 64), (64, 32))]
    theirs = [torch.nn.Parameter(matrix.detach().clone()) for matrix in ours]
    optimisers = Muon(ours, lr=0.1), torch.optim.Muon(theirs, lr=0.1, weight_decay=0.01, momentum=0.95, nesterov=True)
    for _ in range(4):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        for optimiser in optimisers:
            optimiser.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-3)
