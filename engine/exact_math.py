"""Arithmetic that is equal bit for bit on every device: logarithm, exponential and a random number generator.

The libraries' functions differ in the last bit between CPUs, GPUs and releases, which could change a sampled token.
Additions, multiplications and divisions are rounded alike everywhere. The logarithm follows fdlibm's e_log.c; the
exponential is argument reduction and a Taylor polynomial (1 to 2 ulp). The generator is Philox4x32-10 of Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3" (SC 2011), in 64-bit integer operations that wrap alike on CPU and CUDA.
"""

import math

import torch

LN2_HI, LN2_LO = 6.93147180369123816490e-01, 1.90821492927058770002e-10
INVERSE_LN2 = 1.44269504088896338700
LOG_ODD = (6.666666666666735130e-01, 2.857142874366239149e-01, 1.818357216161805012e-01, 1.479819860511658591e-01)
LOG_EVEN = (3.999999999940941908e-01, 2.222219843214978396e-01, 1.531383769920937332e-01)
_MANTISSA = (1 << 52) - 1
_ONE = 1023 << 52
SQRT_HALF = 0.7071067811865476
TAYLOR = tuple(1.0 / math.factorial(n) for n in range(14))  # the next term is below half an ulp for |r| <= ln(2) / 2
EXP_LEAST = -700.0


def log(x: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm of float64 x, which must be positive, finite and normal."""
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & _MANTISSA) | _ONE).view(torch.float64)  # in [1, 2)
    halve = mantissa * 0.5 > SQRT_HALF
    mantissa = torch.where(halve, mantissa * 0.5, mantissa)
    k = (exponent + halve.to(torch.int64)).to(torch.float64)
    f = mantissa - 1.0
    s = f / (f + 2.0)
    z = s * s
    w = z * z
    even = w * (LOG_EVEN[0] + w * (LOG_EVEN[1] + w * LOG_EVEN[2]))
    odd = z * (LOG_ODD[0] + w * (LOG_ODD[1] + w * (LOG_ODD[2] + w * LOG_ODD[3])))
    half_square = f * f * 0.5
    return k * LN2_HI - ((half_square - (s * (half_square + (even + odd)) + k * LN2_LO)) - f)


def exp(x: torch.Tensor) -> torch.Tensor:
    """Return the exponential of float64 x <= 0; the result is 0 below -700."""
    clamped = x.clamp(min=EXP_LEAST)
    k = torch.round(clamped * INVERSE_LN2)
    r = (clamped - k * LN2_HI) - k * LN2_LO
    value = torch.full_like(r, TAYLOR[-1])
    for coefficient in reversed(TAYLOR[:-1]):
        value = value * r + coefficient
    scale = ((k.to(torch.int64) + 1023) << 52).view(torch.float64)
    return torch.where(x < EXP_LEAST, 0.0, value * scale)


MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Return four random words per counter.

    All tensors are int64 with values in 0..2^32-1; their shapes must broadcast together.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The product wraps in int64; shifting and masking still yields its unsigned high and low words.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + WEYL[0]) & _MASK, (k1 + WEYL[1]) & _MASK
    return c0, c1, c2, c3
