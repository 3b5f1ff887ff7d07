"""How a tile of the Hopper GEMM begins and ends: starts and integers of chains, and three ways to write it.

`write` stores the accumulator rounded to the output's dtype, or as the integers of its chains; `add` adds it
to an fp32 output, one IEEE addition per element. Both go through shared memory in chunks of columns, by TMA.
"""

# Triton's signatures do not describe what a jitted function accepts.
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportFunctionMemberAccess=false
# ruff: noqa: RET505, RUF005 - Gluon needs constexpr branches spelled out

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma


@gluon.jit
def _chunks(x, COUNT: gl.constexpr):
    """Split [rows, columns] into COUNT tensors of neighbouring columns, without moving a register."""
    if COUNT == 1:
        return (x,)
    else:
        left, right = x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()
        return _chunks(left, COUNT // 2) + _chunks(right, COUNT // 2)


@gluon.jit
def _peek(pointer, like, m, n, M, N):
    """The block of `pointer` [M, N] at (m, n), zero outside, in the shape and layout of `like`."""
    layout: gl.constexpr = like.type.layout
    rows = m + gl.arange(0, like.shape[0], layout=gl.SliceLayout(1, layout))
    columns = n + gl.arange(0, like.shape[1], layout=gl.SliceLayout(0, layout))
    pointers = pointer + gl.expand_dims(rows, 1).to(gl.int64) * N + gl.expand_dims(columns, 0)
    inside = gl.expand_dims(rows < M, 1) & gl.expand_dims(columns < N, 0)
    return gl.load(pointers, mask=inside, other=0.0)


@gluon.jit
def chain_start(
    row_ptr, column_ptr, minus, m, n, M, N,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """1.5 * 2^E, negative where `minus`, with row scale * column scale < 2^(E-1)."""
    rows = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = n + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    row = gl.load(row_ptr + rows, mask=rows < M, other=0.0)
    column = gl.load(column_ptr + columns, mask=columns < N, other=0.0)
    bound = gl.expand_dims(row, 1) * gl.expand_dims(column, 0)
    start = (bound.to(gl.int32, bitcast=True) & 0x7F800000) + ((minus << 31) + 0x01400000)
    return start.to(gl.float32, bitcast=True)


@gluon.jit
def _chain_integer(accumulator, minus, origin):
    """The integer of chains on the side of their sign, less `origin`."""
    sign = 1 - 2 * minus
    return (accumulator.to(gl.int32, bitcast=True) & 0x7FFFFF) * sign - (0x400000 * sign + origin)


@gluon.jit
def crossed(accumulator):
    """The same integers on the other side of zero: a shift by 3 * 2^E, exact."""
    power = (accumulator.to(gl.int32, bitcast=True) & -8388608).to(gl.float32, bitcast=True)
    return accumulator - 3.0 * power


@gluon.jit
def fresh(accumulator):
    """Chains as they began on their side of zero: their integers are zero."""
    start = (accumulator.to(gl.int32, bitcast=True) & -8388608) | 0x400000
    return start.to(gl.float32, bitcast=True)


@gluon.jit
def strays(accumulator, window):
    """Whether the integer of any chain lies outside of its row's window i32 [rows].

    (integer + window) * 2^9, unsigned: two instructions per element keep the look cheap.
    """
    shift = gl.expand_dims((window << 9) + -2147483648, 1)
    drift = (accumulator.to(gl.int32, bitcast=True) << 9) + shift
    worst = gl.max(drift.to(gl.uint32, bitcast=True), 1)
    return gl.max(((worst >> 10).to(gl.int32) > window).to(gl.int32), 0) > 0


@gluon.jit
def _places(bank_ptr, like, column, width):
    """Where the bank has the elements of `like`, which begins at `column` of a part `width` columns wide."""
    layout: gl.constexpr = like.type.layout
    rows = gl.arange(0, like.shape[0], layout=gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, like.shape[1], layout=gl.SliceLayout(0, layout))
    return bank_ptr + gl.expand_dims(rows, 1) * width + gl.expand_dims(columns, 0)


@gluon.jit
def _with_bank(integers, bank_ptr, banked, column, width):
    """The integers and what is banked of them."""
    if banked > 0:
        integers += gl.load(_places(bank_ptr, integers, column, width))
    return integers


@gluon.jit
def bank(bank_ptr, banked, accumulator, minus, SPLIT: gl.constexpr):
    """Add the integers of chains to what is banked; where nothing is, they are put there."""
    chunks = _chunks(_chain_integer(accumulator, minus, 0), SPLIT)
    columns: gl.constexpr = accumulator.shape[1]
    width: gl.constexpr = columns // SPLIT
    for i in gl.static_range(SPLIT):
        total = _with_bank(chunks[i], bank_ptr, banked, i * width, columns)
        gl.store(_places(bank_ptr, total, i * width, columns), total)


@gluon.jit
def _send(c_desc, buffers, chunk, m, n, SLOT: gl.constexpr, BUFFERS: gl.constexpr):
    """Store one chunk by TMA through its buffer, once the store that used it before has read it."""
    tma.store_wait(pendings=BUFFERS - 1)
    buffers.index(SLOT).store(chunk)
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [m, n], buffers.index(SLOT))


@gluon.jit
def write(
    c_desc, buffers, accumulator, minus, origin, bank_ptr, banked, m, n,
    HALF: gl.constexpr, EPILOGUE: gl.constexpr, PIECES: gl.constexpr, SPLIT: gl.constexpr,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    """Store a tile's part rounded to the output's dtype, or as the integers of its chains with the banked."""
    if EPILOGUE == "chain":
        chunks = _chunks(_chain_integer(accumulator, minus, origin), SPLIT)
    else:
        chunks = _chunks(accumulator.to(c_desc.dtype), SPLIT)
    columns: gl.constexpr = accumulator.shape[1]
    width: gl.constexpr = columns // SPLIT
    for i in gl.static_range(SPLIT):
        values = chunks[i]
        if PIECES:
            values = _with_bank(values, bank_ptr, banked, i * width, columns)
        _send(c_desc, buffers, values, m, n + i * width, HALF * BUFFERS + i % BUFFERS, BUFFERS)


@gluon.jit
def read_ahead(c_ptr, like, m, n, M, N, PRELOAD: gl.constexpr, SPLIT: gl.constexpr):
    """The first PRELOAD of SPLIT chunks of the output at (m, n), in the layout of the accumulator `like`."""
    chunks = ()
    for i in gl.static_range(min(PRELOAD, SPLIT)):
        at = n + i * (like.shape[1] // SPLIT)
        chunks = chunks + (_peek(c_ptr, _chunks(like, SPLIT)[0], m, at, M, N),)
    return chunks


@gluon.jit
def add(
    c_desc, c_ptr, buffers, accumulator, ahead, m, n, M, N,
    HALF: gl.constexpr, SPLIT: gl.constexpr, BUFFERS: gl.constexpr, PRELOAD: gl.constexpr,
):  # fmt: skip
    """Add a tile's part to the output; PRELOAD chunks of it are read ahead of the sum."""
    chunks = _chunks(accumulator, SPLIT)
    width: gl.constexpr = accumulator.shape[1] // SPLIT
    for i in gl.static_range(SPLIT):
        total = chunks[i] + ahead[0]
        ahead = ahead[1:]
        if i + PRELOAD < SPLIT:
            ahead = ahead + (_peek(c_ptr, chunks[i], m, n + (i + PRELOAD) * width, M, N),)
        _send(c_desc, buffers, total, m, n + i * width, HALF * BUFFERS + i % BUFFERS, BUFFERS)
