"""Values close to normal, a pure function of key and position: what initial weights are made of.

The bits are those of the twin, `reference/initial.py`, which takes them from numpy: a value depends on key,
position and scale alone. Philox and the sum of sixteen 16-bit integers are integer arithmetic, and taking off
the mean is exact; one multiplication in float64 and one rounding to float32 follow, which IEEE defines. No
addition follows the product, so there is nothing to fuse it with.
"""

# Triton types neither its launch keywords nor what its builtins return.
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

_TILE = 1024
_MEAN = 8 * 65535


def fill_normal(out: torch.Tensor, key: bytes, first: int, scale: float) -> None:
    """Fill f32 out [n] with values `first` to `first + n` of the stream of `key`, 16 bytes.

    The scale goes through memory, because Triton would round a Python float to float32.
    """
    assert out.is_contiguous()
    assert out.dtype == torch.float32
    count = out.numel()
    words = torch.frombuffer(bytearray(key), dtype=torch.int64).to(out.device)
    factor = torch.tensor([scale], dtype=torch.float64, device=out.device)
    _fill_kernel[(triton.cdiv(count, _TILE),)](
        out, words, factor, first, count, TILE=_TILE, MEAN=_MEAN, num_warps=4
    )


@triton.jit
def _pair_sums(word):
    """Sum the four 16-bit integers of u64 `word` in pairs, one sum in either half of the result."""
    return (word & 0x0000FFFF0000FFFF) + ((word >> 16) & 0x0000FFFF0000FFFF)


@triton.jit(do_not_specialize=["first", "count"])
def _fill_kernel(out_ptr, key_ptr, scale_ptr, first, count, TILE: tl.constexpr, MEAN: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    counter = (first + index + 1).to(tl.uint64)  # numpy's first block has counter 1
    zero = tl.zeros_like(counter)
    key0, key1 = tl.load(key_ptr).to(tl.uint64), tl.load(key_ptr + 1).to(tl.uint64)
    a, b, c, d = tl.philox_impl(counter, zero, zero, zero, key0, key1)
    pairs = _pair_sums(a) + _pair_sums(b) + _pair_sums(c) + _pair_sums(d)
    centred = (pairs + (pairs >> 32)).to(tl.int32) - MEAN
    value = centred.to(tl.float64) * tl.load(scale_ptr)
    tl.store(out_ptr + index, value.to(tl.float32), mask=index < count)
