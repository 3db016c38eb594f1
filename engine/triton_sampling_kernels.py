"""Inner loops of sampling on GPUs in Triton. They are launched with `enable_fp_fusion=False`: a multiplication that is
fused with an addition is rounded once instead of twice, and results would differ from those of `engine.exact_math`.

Draws are rows of int64 [DRAW_FIELDS], the fields of `sampling_kernels.DRAW` in their order, floats as their bits. With
TRITON_INTERPRET=1 the kernels run on CPU tensors.
"""

import triton
import triton.language as tl

from engine import exact_math

DRAW_FIELDS = tl.constexpr(7)
_TEMPERATURE, _MIN_P = tl.constexpr(0), tl.constexpr(2)
_SEED, _CHOICE, _INDEX = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
_LN2_HI, _LN2_LO = tl.constexpr(exact_math.LN2_HI), tl.constexpr(exact_math.LN2_LO)
_INVERSE_LN2, _SQRT_HALF = tl.constexpr(exact_math.INVERSE_LN2), tl.constexpr(exact_math.SQRT_HALF)
_EVEN0, _EVEN1, _EVEN2 = (tl.constexpr(each) for each in exact_math.LOG_EVEN)
_ODD0, _ODD1, _ODD2, _ODD3 = (tl.constexpr(each) for each in exact_math.LOG_ODD)
_TAYLOR = tl.constexpr(exact_math.TAYLOR)
_TERMS = tl.constexpr(len(exact_math.TAYLOR))
_EXP_LEAST = tl.constexpr(exact_math.EXP_LEAST)
_M0, _M1 = (tl.constexpr(each) for each in exact_math.MULTIPLIERS)
_W0, _W1 = (tl.constexpr(each) for each in exact_math.WEYL)
_ROUNDS = tl.constexpr(exact_math.ROUNDS)
_MANTISSA, _ONE = tl.constexpr((1 << 52) - 1), tl.constexpr(1023 << 52)
_TO_WHOLE = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52: adding it to a small float64 rounds it, half to even
_LN_2_32 = tl.constexpr(22.18070977791825)  # ln(2^32)
_MOST_NOISE = tl.constexpr(36.75)  # above 53 ln 2
_SLACK = tl.constexpr(1e-3)  # far above the errors of a logarithm in float32
_RELATIVE_SLACK = tl.constexpr(1e-6)  # far above the errors of a multiplication and an addition in float32
_LEAST_SLACK = tl.constexpr(1e-30)  # above products that underflow


@triton.jit
def _words(pair, draw):  # type: ignore[no-untyped-def]
    """Return Philox' four words, uint32, for pairs of ids, as `exact_math.philox4x32`."""
    seed = tl.load(draw + _SEED)
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0, zero = pair.to(tl.uint32), tl.zeros_like(pair).to(tl.uint32)
    c1, c2, c3 = zero + tl.load(draw + _INDEX).to(tl.uint32), zero + tl.load(draw + _CHOICE).to(tl.uint32), zero
    k0, k1 = zero + k0, zero + k1
    m0, m1 = tl.full(pair.shape, _M0, tl.uint32), tl.full(pair.shape, _M1, tl.uint32)
    w0, w1 = tl.full(pair.shape, _W0, tl.uint32), tl.full(pair.shape, _W1, tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        high0, low0, high1, low1 = tl.umulhi(c0, m0), c0 * m0, tl.umulhi(c2, m1), c2 * m1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + w0, k1 + w1
    return c0, c1, c2, c3


@triton.jit
def _log(x):  # type: ignore[no-untyped-def]
    """Return the logarithm of float64 x, as `exact_math.log`."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & _MANTISSA) | _ONE).to(tl.float64, bitcast=True)
    halve = mantissa * 0.5 > _SQRT_HALF
    mantissa = tl.where(halve, mantissa * 0.5, mantissa)
    k = (exponent + halve.to(tl.int64)).to(tl.float64)
    f = mantissa - 1.0
    s = f / (f + 2.0)
    z = s * s
    w = z * z
    even = w * (_EVEN0 + w * (_EVEN1 + w * _EVEN2))
    odd = z * (_ODD0 + w * (_ODD1 + w * (_ODD2 + w * _ODD3)))
    half_square = f * f * 0.5
    return k * _LN2_HI - ((half_square - (s * (half_square + (even + odd)) + k * _LN2_LO)) - f)


@triton.jit
def _exp(x):  # type: ignore[no-untyped-def]
    """Return the exponential of float64 x <= 0, as `exact_math.exp`."""
    clamped = tl.where(x < _EXP_LEAST, _EXP_LEAST, x)
    k = (clamped * _INVERSE_LN2 + _TO_WHOLE) - _TO_WHOLE
    r = (clamped - k * _LN2_HI) - k * _LN2_LO
    value = tl.zeros_like(r) + _TAYLOR[_TERMS - 1]
    for term in tl.static_range(1, _TERMS):
        value = value * r + _TAYLOR[_TERMS - 1 - term]
    scale = ((k.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.where(x < _EXP_LEAST, 0.0, value * scale)


@triton.jit
def _bounded(logits, at, mask, high, temperature):  # type: ignore[no-untyped-def]
    """Return upper bounds of scores, float32: with x = 1 - u, the noise -log(-log(u)) is at most -log(x)."""
    logit = tl.load(logits + at, mask=mask, other=0.0).to(tl.float32)
    rest = (high ^ 0xFFFFFFFF).to(tl.float32)  # a lower bound of x * 2^32, but for its rounding
    noise = tl.where(rest == 0, _MOST_NOISE, _LN_2_32 - tl.log(tl.where(rest == 0, 1.0, rest))) + _SLACK
    reach = temperature * noise
    bound = logit + reach + ((tl.abs(logit) + reach) * _RELATIVE_SLACK + _LEAST_SLACK)
    return tl.where(logit == float("-inf"), logit, bound)


@triton.jit
def bound_scores(logits, draws, bounds, vocab_size, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write upper bounds of the scores of logits [B, V] to bounds, float32 [B, V]; 2 * PAIRS ids per program."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    draw = draws + row * DRAW_FIELDS
    temperature = tl.load(draw + _TEMPERATURE).to(tl.float64, bitcast=True).to(tl.float32)
    _, high_of_even, _, high_of_odd = _words(pair, draw)
    for odd in tl.static_range(2):
        token = 2 * pair + odd
        at, mask = row * vocab_size + token, token < vocab_size
        high = high_of_odd if odd else high_of_even
        tl.store(bounds + at, _bounded(logits, at, mask, high, temperature), mask=mask)


@triton.jit
def score_candidates(logits, ids, tops, draws, scores, weights, count, WIDTH: tl.constexpr, WEIGHS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the scores of ids, int64 [B, count], to scores, float64 [B, count], and with WEIGHS their probabilities as
    shares of that of the most likely id to weights, float64 [B, count]; WIDTH ids per program.

    `logits` [B, count] are those of the ids, `tops` [B] the largest of each row.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    at, mask = row * count + column, column < count
    draw = draws + row * DRAW_FIELDS
    temperature = tl.load(draw + _TEMPERATURE).to(tl.float64, bitcast=True)
    token = tl.load(ids + at, mask=mask, other=0)
    w0, w1, w2, w3 = _words(token >> 1, draw)
    is_odd = (token & 1) == 1
    high, low = tl.where(is_odd, w3, w1).to(tl.int64), tl.where(is_odd, w2, w0).to(tl.int64)
    uniform = (((high << 20) | (low >> 12)).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
    noise = -_log(-_log(uniform))
    logit = tl.load(logits + at, mask=mask, other=0.0).to(tl.float64)
    tl.store(scores + at, logit + temperature * noise, mask=mask)
    if WEIGHS:
        tl.store(weights + at, _exp((logit - tl.load(tops + row).to(tl.float64)) / temperature), mask=mask)


@triton.jit
def sum_weights(logits, tops, draws, sums, vocab_size, UNIT: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the sums of the weights, in units of 1 / UNIT, of the ids that min-p keeps to sums, int64 [B, programs].

    `tops` [B] are the rows' largest logits; each program sums WIDTH ids.
    """
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = column < vocab_size
    draw = draws + row * DRAW_FIELDS
    temperature = tl.load(draw + _TEMPERATURE).to(tl.float64, bitcast=True)
    min_p = tl.load(draw + _MIN_P).to(tl.float64, bitcast=True)
    logit = tl.load(logits + row * vocab_size + column, mask=mask, other=float("-inf")).to(tl.float64)
    weight = _exp((logit - tl.load(tops + row).to(tl.float64)) / temperature)
    units = tl.where(mask & (weight >= min_p), (weight * UNIT).to(tl.int64), 0)
    tl.store(sums + row * tl.num_programs(1) + tl.program_id(1), tl.sum(units, 0))
