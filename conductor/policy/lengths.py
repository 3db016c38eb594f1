"""Distribution of a request's answer length, learned online from answers to similar requests, with its compiled loops.

A distribution is a survival curve: the share of answers that have at least so many tokens. Curves are stored at
points, four per octave, and interpolated linearly: exact up to 8 tokens, a few per cent off beyond. Cell `i` is the
interval from point `i` to the next one.

A request's kind is the length of its dialogue's previous answer, which says more than the prompt does, or, without one,
the length of its prompt. An answer belongs to nested groups: its model, its model and kind, its tenant, its tenant and
kind. A group with few answers follows the wider one. Curves are Kaplan-Meier estimates, in which an answer that was cut
off at its limit counts as censored: it is only known to be longer. So do answers that have not ended yet. Without them,
those seen in a cluster's first minute would be the shorter ones.
"""

import functools
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from conductor.policy.events import NS
from conductor.policy.requests import REQUEST
from jit.compiling import compiled_with_gil

__all__ = [
    "CELLS",
    "ENDED",
    "ENDLESS",
    "GOES_ON",
    "KINDS",
    "LEVELS",
    "MAX_TENANTS",
    "LengthKernels",
    "Lengths",
    "cell_of",
    "grid",
    "length_kernels",
    "survival",
]

CELLS: Final = 80  # per curve; answers of 2**20 tokens and more are not distinguished
LEVELS: Final = 4  # nested groups that an answer belongs to
ENDED, GOES_ON = 0, 1  # counted separately: answers that ended, and censored ones
_RUNNING: Final = 2  # those that have not ended, as of the last `count_running`
_SHIFT: Final = 50  # bits of a float64 below the two that tell the quarter of an octave
_BIAS: Final = 1023 << 2
_FRACTION: Final = (1 << _SHIFT) - 1
_TO_UNIT: Final = 2.0**-_SHIFT
_SOME: Final = 8.0  # weight of the wider group's curve, in answers
_AT_FIRST: Final = 2.0  # weight of the widest group's prior, in which no answer ends before its limit


def cell_of(tokens: Any) -> Any:
    """Return the cell in which an answer of `tokens` >= 1 ends."""
    return min(CELLS - 1, (np.float64(tokens).view(np.int64) >> _SHIFT) - _BIAS)


def survival(curves: Any, curve: Any, tokens: Any) -> Any:
    """Return the share of answers that have more than `tokens`, by row `curve` of `curves`."""
    bits = np.float64(tokens + 1.0).view(np.int64)
    cell = (bits >> _SHIFT) - _BIAS
    if cell >= CELLS:
        return curves[curve, CELLS]
    here = curves[curve, cell]
    return here + (curves[curve, cell + 1] - here) * ((bits & _FRACTION) * _TO_UNIT)


_cell_of: Any = numba.njit(cell_of)


_HALF_NS: Final = 900 * NS  # half-life of counts
_KEPT: Final = 16.0  # weight, in answers, below which counts do not decay


def learn(counts: Any, weights: Any, at_ns: Any, groups: Any, now_ns: Any, tokens: Any, kind: Any) -> None:
    """Count an answer of `tokens` in `counts` [groups, 3, CELLS] of all of its `groups` (-1: none).

    Earlier counts lose half of their weight every `_HALF_NS`, but not below `_KEPT` answers.
    """
    cell = _cell_of(tokens)
    for level in range(len(groups)):
        group = groups[level]
        if group < 0:
            continue
        passed = now_ns - at_ns[group]
        if passed > _HALF_NS // 64:
            weight = weights[group]
            factor = max(2.0 ** -(passed / _HALF_NS), min(1.0, _KEPT / max(weight, 1e-300)))
            weights[group] = weight * factor
            for i in range(CELLS):
                counts[group, 0, i] *= factor
                counts[group, 1, i] *= factor
            at_ns[group] = now_ns
        counts[group, kind, cell] += 1.0
        weights[group] += 1.0


def count_running(counts: Any, paths: Any, requests: Any, step_ns: Any, now_ns: Any) -> None:
    """Replace the counts of answers that have not ended by those of `requests` REQUEST [n] that decode now.

    `paths` [groups, LEVELS]: the nested groups of each curve; `step_ns` [slots]: time per token on each node.
    """
    counts[:, _RUNNING, :] = 0.0
    for row in range(len(requests)):
        request = requests[row]
        if request.curve <= 0 or request.decode_node < 0 or request.joined_ns < 0:
            continue
        tokens = request.generated + max(0, now_ns - request.joined_ns) // max(1, step_ns[request.decode_node])
        if request.max_new > 0:
            tokens = min(tokens, request.generated + request.max_new - 1)
        if tokens < 1:
            continue
        cell = _cell_of(tokens)
        for level in range(LEVELS):
            if paths[request.curve, level] >= 0:
                counts[paths[request.curve, level], _RUNNING, cell] += 1.0


def draw(counts: Any, groups: Any, hazards: Any, curve: Any) -> None:
    """Write to `curve` [CELLS + 1] the survival curve of the innermost of `groups`, which lists the widest first.

    A cell's hazard is the share of the answers that reached it and ended there (Kaplan-Meier), with the wider group's
    hazard as a prior. `hazards` [CELLS] is scratch space.
    """
    hazards[:] = 0.0
    for level in range(len(groups)):
        group = groups[level]
        if group < 0:
            continue
        prior = _SOME if level else _AT_FIRST
        reached = prior
        for i in range(CELLS - 1, -1, -1):
            ended = counts[group, ENDED, i]
            reached += ended
            hazards[i] = (ended + prior * hazards[i]) / reached
            reached += counts[group, GOES_ON, i] + counts[group, _RUNNING, i]
    left = 1.0
    for i in range(CELLS):
        curve[i] = left
        left *= 1.0 - min(1.0, hazards[i])
    curve[CELLS] = left


def expected(curves: Any, curve: Any, limit: Any) -> Any:
    """Return the expected tokens of an answer of at most `limit` >= 1, by row `curve` of `curves`."""
    total = 1.0
    for cell in range(CELLS):
        width = 0.25 * 2.0 ** (cell >> 2)
        begin = (4 + (cell & 3)) * width
        if begin >= limit:
            break
        part = min(width, limit - begin)
        here = curves[curve, cell]
        total += part * (here + 0.5 * (curves[curve, cell + 1] - here) * part / width)
    return total


class LengthKernels(NamedTuple):
    """Compiled versions of the functions of the same names."""

    learn: Any
    count_running: Any
    draw: Any
    expected: Any


@functools.cache
def length_kernels() -> LengthKernels:
    """Return the compiled functions; the first call compiles them or loads them from the cache."""
    n, f = types.int64, types.float64
    counts, floats, ints = types.Array(f, 3, "C"), types.Array(f, 1, "C"), types.Array(n, 1, "C")
    paths, requests = types.Array(n, 2, "C"), types.Array(numba.from_dtype(REQUEST), 1, "C")
    return LengthKernels(
        compiled_with_gil(learn, types.void(counts, floats, ints, ints, n, n, n)),
        compiled_with_gil(count_running, types.void(counts, paths, requests, ints, n)),
        compiled_with_gil(draw, types.void(counts, ints, floats, floats)),
        compiled_with_gil(expected, f(types.Array(f, 2, "C"), n, n)),
    )


Floats = NDArray[np.float64]
ENDLESS: Final = 0  # curve of endless requests
MAX_TENANTS: Final = 64  # per model with curves of their own; the answers of others are counted with the model's
_SIZES: Final = 6  # kinds by prompt length: below 256 tokens, 1k, 4k, 16k, 64k, longer
_ANSWERS: Final = 26  # kinds by previous answer, two per octave: 1 token, 2, 3, 4 or 5, 6 or 7, ..., 6144 and more
KINDS: Final = _SIZES + _ANSWERS
_IDLE_NS: Final = 1800 * NS  # a tenant without answers for so long may be replaced by another


def grid() -> Floats:
    """Return the points of a curve, float64 [CELLS + 1]: entry i of a curve is the share of answers of at least so many
    tokens.
    """
    octave, quarter = np.divmod(np.arange(CELLS + 1), 4)
    return np.asarray(2.0**octave * (1 + quarter / 4))


def _kind(prompt_tokens: int, previous_tokens: int) -> int:
    if previous_tokens <= 0:
        return min(_SIZES - 1, max(0, (prompt_tokens.bit_length() - 7) // 2))
    octave = previous_tokens.bit_length() - 1
    half = (previous_tokens << 1 >> octave) & 1
    return _SIZES + min(_ANSWERS - 1, 2 * octave + half)


@dataclass
class _Family:
    """Groups of a model, or of one of its tenants: that of all its answers, and one per kind; 0: none yet."""

    everything: int = 0
    kinds: list[int] = field(default_factory=lambda: [0] * KINDS)
    taught_ns: int = 0


@dataclass
class _Model:
    everyone: _Family = field(default_factory=_Family)
    tenants: dict[str, _Family] = field(default_factory=dict)


class Lengths:
    """Survival curves of all groups and the counts that they are computed from.

    The number of a group's curve never changes; its row is up to date as of the last `curve_of` that returned it.
    """

    def __init__(self) -> None:
        self.curves = np.ones((1, CELLS + 1))
        self._counts = np.zeros((1, 3, CELLS))
        self._weights = np.zeros(1)
        self._at_ns = np.zeros(1, np.int64)
        self._groups = np.full((1, LEVELS), -1, np.int64)  # nested groups of each curve, the widest first
        self._used = 1
        self._models: dict[str, _Model] = {}
        self._hazards = np.empty(CELLS)
        self._drawn: set[int] = set()  # curves that are up to date
        length_kernels()

    def __len__(self) -> int:
        """Return the number of groups."""
        return self._used - 1

    def curve_of(self, now_ns: int, model: str, tenant: str, prompt_tokens: int, previous_tokens: int = 0) -> int:
        """Return the row of `curves` [n, CELLS + 1] for a request, after bringing that row up to date.

        `previous_tokens`: length of the dialogue's previous answer; 0: there is none, or it is not known.
        """
        kind = _kind(prompt_tokens, previous_tokens)
        known = self._models.get(model)
        if known is None:
            known = self._models[model] = _Model()
        everyone = known.everyone
        curve = everyone.kinds[kind]
        if not curve:
            everyone.everything = everyone.everything or self._add(now_ns)
            curve = everyone.kinds[kind] = self._add(now_ns, everyone.everything)
        own = self._family(now_ns, known, tenant) if tenant else None
        if own is not None:
            own.everything = own.everything or self._add(now_ns)
            wider = curve
            curve = own.kinds[kind]
            if not curve:
                curve = own.kinds[kind] = self._add(now_ns, everyone.everything, wider, own.everything)
        if curve not in self._drawn:
            length_kernels().draw(self._counts, self._groups[curve], self._hazards, self.curves[curve])
            self._drawn.add(curve)
        return curve

    def learn(self, now_ns: int, curve: int, tokens: int, *, ended: bool) -> None:
        """Count an answer of `tokens` in the groups of `curve`; `ended` False: it is only known not to be shorter."""
        if curve == ENDLESS or tokens < 1:
            return
        self._drawn.clear()
        length_kernels().learn(
            self._counts,
            self._weights,
            self._at_ns,
            self._groups[curve],
            now_ns,
            tokens,
            ENDED if ended else GOES_ON,
        )

    def count_running(self, now_ns: int, requests: NDArray[np.void], step_ns: NDArray[np.int64]) -> None:
        """Count the answers that `requests` REQUEST [n] have generated so far; call this regularly.

        `step_ns` [slots]: time per token on each node.
        """
        self._drawn.clear()
        length_kernels().count_running(self._counts, self._groups, requests, step_ns, now_ns)

    def survival(self, curve: int, tokens: int) -> float:
        """Return the share of answers that have more than `tokens`."""
        return float(survival(self.curves, curve, tokens))

    def expected(self, curve: int, limit: int) -> float:
        """Return the expected tokens of an answer of at most `limit`, at least 1."""
        tokens: float = length_kernels().expected(self.curves, curve, max(1, limit))
        return tokens

    def quantile(self, curve: int, exceeded: float, generated: int, limit: int) -> int:
        """Return the number of further tokens that an answer with `generated` exceeds with probability `exceeded`.

        The result is at most `limit`.
        """
        row = self.curves[curve]
        wanted = exceeded * self.survival(curve, generated)
        points = np.flatnonzero(row <= wanted)
        if exceeded <= 0 or not len(points):
            return limit
        # The share with at least this many tokens is small enough; so is the share that exceeds one token less.
        most = int(np.ceil(grid()[points[0]])) - 1
        return min(limit, max(1, most - generated))

    def weight(self, curve: int) -> float:
        """Return the number of answers in the innermost group of the curve, older ones with less weight."""
        return float(self._weights[curve])

    def _family(self, now_ns: int, model: _Model, tenant: str) -> _Family | None:
        family = model.tenants.get(tenant)
        if family is None:
            if len(model.tenants) >= MAX_TENANTS:
                # Running requests of the replaced tenant still count in its groups; that decays soon.
                idle = min(model.tenants, key=lambda name: (self._taught_ns(model.tenants[name]), name))
                if now_ns - self._taught_ns(model.tenants[idle]) < _IDLE_NS:
                    return None
                family = model.tenants.pop(idle)
                self._forget(now_ns, family)
            else:
                family = _Family()
            family.taught_ns = now_ns
            model.tenants[tenant] = family
        return family

    def _taught_ns(self, family: _Family) -> int:
        return max(family.taught_ns, int(self._at_ns[family.everything]) if family.everything else 0)

    def _forget(self, now_ns: int, family: _Family) -> None:
        self._drawn.clear()
        for group in (family.everything, *family.kinds):
            if group:
                self._counts[group], self._weights[group], self._at_ns[group] = 0.0, 0.0, now_ns

    def _add(self, now_ns: int, *wider: int) -> int:
        group = self._used
        if group == len(self._weights):
            self.curves = np.concatenate([self.curves, np.ones_like(self.curves)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._weights = np.concatenate([self._weights, np.zeros_like(self._weights)])
            self._at_ns = np.concatenate([self._at_ns, np.zeros_like(self._at_ns)])
            self._groups = np.concatenate([self._groups, np.full_like(self._groups, -1)])
        self._used += 1
        self._at_ns[group] = now_ns
        path = (*wider, group)
        self._groups[group, : len(path)] = path
        return group
