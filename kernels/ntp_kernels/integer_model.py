"""What a Hopper tensor core computes in a bf16 GEMM, bit for bit, on a machine without one.

One k16 step of `wgmma`/`mma.sync` (bf16 x bf16 -> fp32) is a fused sum of the accumulator and 16 exact
products. With E the largest exponent among them (a product's exponent is the SUM of its operands'
exponents, not the normalised product's; a zero takes no part):

1. the accumulator and every product are truncated toward zero to a multiple of 2^(E-25);
2. the seventeen are added exactly;
3. the sum is truncated toward zero to 24 significant bits.

The groups of 16 follow each other in ascending k. The model reproduces every output in
`tests/data/mma_h100.npz` (captured from an H100, equal on an H200); it is the oracle for the kernels.
Left out: infinities, NaNs and results below 2^-126, which the captured data do not cover.

float64 holds every quantity here exactly: a product has 16 significant bits, an aligned addend at most 27,
the sum of seventeen at most 32.
"""

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]

STEP = 16
"""Products in one fused sum."""
GUARD_BITS = 25
SIGNIFICANT_BITS = 24
MANTISSA_MASK = 0x7FFFFF
CHAIN_ORIGIN = 0x400000
"""Mantissa of 1.5: what a biased accumulator holds before the first product."""
_NO_EXPONENT = -(1 << 20)


def bf16_from_bits(bits: NDArray[np.int16]) -> Float32:
    """The float32 values of bf16 bit patterns."""
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def chain_start(exponent: NDArray[np.int16] | NDArray[np.int32]) -> Float32:
    """1.5 * 2^exponent: the accumulator a biased chain starts from."""
    return np.ldexp(np.float32(1.5), exponent.astype(np.int32)).astype(np.float32)


def chain_integer(accumulator: Float32) -> Int32:
    """The exact integer partial sum a biased accumulator holds, in units of 2^(E-23)."""
    return (accumulator.view(np.int32) & MANTISSA_MASK) - CHAIN_ORIGIN


def matmul(a: Float32, b: Float32, start: Float32 | None = None) -> Float32:
    """`start + a @ b.T` as the tensor core rounds it.

    a [M, K] and b [N, K] hold bf16 values; K is a multiple of 16; start [M, N] is the accumulator
    before the first product, zero when absent. Returns float32 [M, N].
    """
    assert a.shape[1] == b.shape[1]
    assert a.shape[1] % STEP == 0
    accumulator = np.zeros((a.shape[0], b.shape[0])) if start is None else start.astype(np.float64)
    for k in range(0, a.shape[1], STEP):
        accumulator = _step(accumulator, a[:, k : k + STEP], b[:, k : k + STEP])
    return accumulator.astype(np.float32)


def _step(accumulator: Float64, a: Float32, b: Float32) -> Float64:
    """One fused sum: accumulator [M, N], a [M, 16], b [N, 16] -> [M, N]."""
    products = a.astype(np.float64)[:, None, :] * b.astype(np.float64)[None, :, :]
    exponents = np.where(products != 0, _exponent(a)[:, None, :] + _exponent(b)[None, :, :], _NO_EXPONENT)
    largest = np.maximum(
        exponents.max(axis=2), np.where(accumulator != 0, _exponent(accumulator), _NO_EXPONENT)
    )
    shift = np.where(largest == _NO_EXPONENT, 0, GUARD_BITS - largest)
    total = np.trunc(np.ldexp(accumulator, shift))
    total += np.trunc(np.ldexp(products, shift[:, :, None])).sum(axis=2)
    return np.ldexp(_significant(total), -shift)


def _exponent(values: Float32 | Float64) -> Int32:
    """floor(log2 |x|); anything for zero."""
    return np.frexp(values)[1] - 1


def _significant(values: Float64) -> Float64:
    """Truncate toward zero to 24 significant bits."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.trunc(np.ldexp(mantissa, SIGNIFICANT_BITS)), exponent - SIGNIFICANT_BITS)
