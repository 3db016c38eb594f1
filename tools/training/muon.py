"""Muon (Jordan et al., 2024) in float32, with all matrices of one shape in one batch.

torch's own orthogonalises one matrix at a time, in bfloat16. On CPUs without bfloat16 instructions, that took longer
than the forward and backward passes together.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the Newton-Schulz iteration, chosen by Jordan et al. for the steepest slope at zero."""
ITERATIONS = 5


def orthogonalised(matrices: Tensor) -> Tensor:
    """Return each matrix U S V^T of [count, rows, columns] as about U V^T; its singular values are 0.7 to 1.2."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.transpose(1, 2) if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; the step's root mean square is ``lr * sqrt(max(1, rows / columns))`` as in torch."""

    def __init__(
        self, matrices: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all matrices by their gradients; ``closure`` is not used."""
        for group in self.param_groups:
            by_shape = defaultdict[torch.Size, list[Tensor]](list)
            for matrix in group["params"]:
                by_shape[matrix.shape].append(matrix)
            for matrices in by_shape.values():
                self._update(group, matrices)
        return None

    def _update(self, group: dict[str, Any], matrices: list[Tensor]) -> None:
        rate, momentum = group["lr"], group["momentum"]
        directions = list[Tensor]()
        for matrix in matrices:
            assert matrix.grad is not None
            kept = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
            kept.lerp_(matrix.grad, 1 - momentum)
            directions.append(matrix.grad.lerp(kept, momentum))
        rows, columns = matrices[0].shape
        for matrix, step in zip(matrices, orthogonalised(torch.stack(directions)), strict=True):
            matrix.mul_(1 - rate * group["weight_decay"]).add_(step, alpha=-rate * max(1, rows / columns) ** 0.5)
