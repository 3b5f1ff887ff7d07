"""The GEMM for Hopper: one warp-specialised kernel, three epilogues.

A program keeps one producer warp and two consumer warpgroups. The producer feeds a ring of shared-memory
stages by TMA and runs ahead over tile borders; the consumers multiply with `wgmma` and write out. In `hopper`
tiles each consumer has half of the rows and the two epilogues overlap with little else; in `pingpong` tiles,
half as large, the consumers take turns, so that one's epilogue hides behind the other's products, at the
price of more traffic from L2.

Invariant: every output element is one chain of k16 steps in ascending k, started from a value that depends on
the element alone. Tile, stages and grid therefore move no bits (`tests/kernels/test_gemm_gpu.py`), and the
plain kernels in `gemm_plain.py` give the same ones.

Epilogues: `store` rounds to the output's dtype; `add` adds to an fp32 output (one IEEE addition per element);
`chain` starts the accumulator at 1.5 * 2^E and stores its integer (see `cut.py`). A chain of several pieces
records the rows whose integer left its window at a piece's end: the consumer never stops for it, and `cut.py`
redoes the rare rows.

Written in Gluon, because Triton's own pipeliner overlaps no epilogue with another tile's loop (measured on an
H100, 2026-11-28, 8192x4096xK, int32 out, TFLOP/s, cuBLAS fp32-out / this / plain: K=3584 755 / 739 / 722,
K=4096 in two pieces 752 / 720 / 666). Left out: clusters with multicast, which Gluon 3.6 does not offer on
Hopper.
"""

# Triton's signatures do not describe what a jitted function accepts.
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportFunctionMemberAccess=false
# ruff: noqa: RET505, RUF005, SIM108 - Gluon needs constexpr branches spelled out

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _tile_of(tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Row and column of a tile: GROUP tile rows at a time, for neighbours to share operands in L2."""
    per_group = GROUP * tiles_n
    first = tile // per_group * GROUP
    size = min(tiles_m - first, GROUP)
    return first + (tile % per_group) % size, (tile % per_group) // size


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
def _chain_start(
    row_ptr, column_ptr, m, n, M, N, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr
):
    """1.5 * 2^E, with row scale * column scale < 2^(E-1)."""
    rows = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = n + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    row = gl.load(row_ptr + rows, mask=rows < M, other=0.0)
    column = gl.load(column_ptr + columns, mask=columns < N, other=0.0)
    bound = gl.expand_dims(row, 1) * gl.expand_dims(column, 0)
    return ((bound.to(gl.int32, bitcast=True) & 0x7F800000) + 0x01400000).to(gl.float32, bitcast=True)


@gluon.jit
def _chain_integer(accumulator, origin):
    return (accumulator.to(gl.int32, bitcast=True) & 0x7FFFFF) - origin


@gluon.jit
def _produce(
    a_desc, b_desc, a_ring, b_ring, ready, empty, M, N, K,
    A_T: gl.constexpr, B_T: gl.constexpr, SHARERS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring, tile after tile. A stage: a block of `a` for each sharer of the tile and one of `b`."""
    tiles_m = gl.cdiv(M, SHARERS * ROWS)
    tiles_n = gl.cdiv(N, COLUMNS)
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _tile_of(tile, tiles_m, tiles_n, GROUP)
        m = tile_m * SHARERS * ROWS
        n = tile_n * COLUMNS
        for k in range(0, K, DEPTH):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            full = ready.index(stage)
            mbarrier.expect(full, a_desc.block_type.nbytes * SHARERS + b_desc.block_type.nbytes)
            for half in gl.static_range(SHARERS):
                if A_T:
                    a_at = [k, m + half * ROWS]
                else:
                    a_at = [m + half * ROWS, k]
                tma.async_copy_global_to_shared(a_desc, a_at, full, a_ring.index(SHARERS * stage + half))
            if B_T:
                tma.async_copy_global_to_shared(b_desc, [n, k], full, b_ring.index(stage))
            else:
                tma.async_copy_global_to_shared(b_desc, [k, n], full, b_ring.index(stage))
            step += 1


@gluon.jit
def _multiply(
    accumulator, step, begin, end, a_ring, b_ring, ready, empty, turns,
    LAST: gl.constexpr, HALF: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr, SHARERS: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Carry the chains over k in [begin, end). One product is in flight; the stage before it is given back.

    LAST: the tile ends here, and the other consumer may take its turn.
    """
    first = step
    for _ in range(begin, end, DEPTH):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        if SHARERS == 2:
            a = a_ring.index(2 * stage + HALF)
        else:
            a = a_ring.index(stage)
        b = b_ring.index(stage)
        if A_T:
            a = a.permute((1, 0))
        if B_T:
            b = b.permute((1, 0))
        accumulator = warpgroup_mma(a, b, accumulator, is_async=True)
        accumulator = warpgroup_mma_wait(num_outstanding=1, deps=(accumulator,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=step > first)
        step += 1
    if LAST and SHARERS == 1:
        mbarrier.arrive(turns.index(1 - HALF), count=1)
    accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=step > first)
    return accumulator, step


@gluon.jit
def _send(c_desc, buffers, chunk, m, n, SLOT: gl.constexpr, BUFFERS: gl.constexpr):
    """Store one chunk by TMA through its buffer, once the store that used it before has read it."""
    tma.store_wait(pendings=BUFFERS - 1)
    buffers.index(SLOT).store(chunk)
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [m, n], buffers.index(SLOT))


@gluon.jit
def _write(
    c_desc, buffers, accumulator, origin, m, n,
    HALF: gl.constexpr, EPILOGUE: gl.constexpr, SPLIT: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Store a tile's part as it is, rounded to the output's dtype, or as the integers of its chains."""
    if EPILOGUE == "chain":
        chunks = _chunks(_chain_integer(accumulator, origin), SPLIT)
    else:
        chunks = _chunks(accumulator.to(c_desc.dtype), SPLIT)
    width: gl.constexpr = accumulator.shape[1] // SPLIT
    for i in gl.static_range(SPLIT):
        _send(c_desc, buffers, chunks[i], m, n + i * width, HALF * BUFFERS + i % BUFFERS, BUFFERS)


@gluon.jit
def _consume(
    HALF: gl.constexpr, c_desc, c_ptr, strayed_ptr, window_ptr, row_ptr, column_ptr,
    a_ring, b_ring, buffers, ready, empty, turns,
    M, N, K, first, length, pieces, origin,
    A_T: gl.constexpr, B_T: gl.constexpr, EPILOGUE: gl.constexpr, PIECES: gl.constexpr, SHARERS: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Multiply and write half the rows of every tile (SHARERS 2), or every other tile (SHARERS 1)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    width: gl.constexpr = COLUMNS // SPLIT
    tiles_m = gl.cdiv(M, SHARERS * ROWS)
    tiles_n = gl.cdiv(N, COLUMNS)
    if SHARERS == 2:
        start = gl.program_id(0)
        stride = gl.num_programs(0)
        row_offset = HALF * ROWS
        others = 0
        step = 0
    else:
        start = gl.program_id(0) + HALF * gl.num_programs(0)
        stride = 2 * gl.num_programs(0)
        row_offset = 0
        others = gl.cdiv(K, DEPTH)
        step = HALF * others
    turn = 0
    for tile in range(start, tiles_m * tiles_n, stride):
        tile_m, tile_n = _tile_of(tile, tiles_m, tiles_n, GROUP)
        m = tile_m * SHARERS * ROWS + row_offset
        n = tile_n * COLUMNS
        if EPILOGUE == "chain":
            accumulator = _chain_start(row_ptr, column_ptr, m, n, M, N, ROWS, COLUMNS, layout)
        else:
            accumulator = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
        if SHARERS == 1:
            # This also makes the parity of `ready` unambiguous: the other consumer saw every earlier stage.
            mbarrier.wait(turns.index(HALF), (turn & 1) ^ (1 - HALF))
            turn += 1
        if PIECES:
            rows = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
            window = gl.load(window_ptr + rows, mask=rows < M, other=0)
            shift = gl.expand_dims((window << 9) + -2147483648, 1)
            worst = gl.zeros((ROWS,), gl.uint32, gl.SliceLayout(1, layout))
            for piece in range(pieces - 1):
                begin = max(first + (piece - 1) * length, 0)
                end = first + piece * length
                accumulator, step = _multiply(
                    accumulator, step, begin, end, a_ring, b_ring, ready, empty, turns,
                    False, HALF, A_T, B_T, SHARERS, DEPTH, STAGES,
                )  # fmt: skip
                # (integer + window) * 2^9, unsigned: two instructions per element keep the look cheap.
                drift = (accumulator.to(gl.int32, bitcast=True) << 9) + shift
                worst = gl.maximum(worst, gl.max(drift.to(gl.uint32, bitcast=True), 1))
            begin = max(first + (pieces - 2) * length, 0)
            strayed = (worst >> 10).to(gl.int32) > window
            gl.store(strayed_ptr + tile_n * M + rows, strayed.to(gl.int8), mask=rows < M)
        else:
            begin = 0
        if EPILOGUE == "add":
            # Read here, so that its latency hides behind the products.
            current = _peek(c_ptr, _chunks(accumulator, SPLIT)[0], m, n, M, N)
        accumulator, step = _multiply(
            accumulator, step, begin, K, a_ring, b_ring, ready, empty, turns,
            True, HALF, A_T, B_T, SHARERS, DEPTH, STAGES,
        )  # fmt: skip
        step += others
        if EPILOGUE == "add":
            chunks = _chunks(accumulator, SPLIT)
            for i in gl.static_range(SPLIT):
                total = chunks[i] + current
                if i + 1 < SPLIT:
                    current = _peek(c_ptr, chunks[i], m, n + (i + 1) * width, M, N)
                _send(c_desc, buffers, total, m, n + i * width, HALF * BUFFERS + i % BUFFERS, BUFFERS)
        else:
            _write(c_desc, buffers, accumulator, origin, m, n, HALF, EPILOGUE, SPLIT, BUFFERS)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["M", "K", "first", "length", "pieces", "origin"])
def gemm_kernel(
    a_desc, b_desc, c_desc, c_ptr, strayed_ptr, window_ptr, row_ptr, column_ptr,
    M, N, K, first, length, pieces, origin,
    A_T: gl.constexpr, B_T: gl.constexpr, EPILOGUE: gl.constexpr, PIECES: gl.constexpr, SHARERS: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, BUFFERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent: two consumer warp groups and a producer, which fills the rings that they empty.

    a is [M, K], [K, M] where A_T; b is [K, N], [N, K] where B_T. The contract and the order of sums are in
    `gemm_hopper`.
    """
    a_ring = gl.allocate_shared_memory(
        gl.bfloat16, [SHARERS * STAGES] + a_desc.block_type.shape, a_desc.layout
    )
    b_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    buffers = gl.allocate_shared_memory(c_desc.dtype, [2 * BUFFERS] + c_desc.block_type.shape, c_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=SHARERS)
    gl.warp_specialize(
        [
            (_consume, (
                0, c_desc, c_ptr, strayed_ptr, window_ptr, row_ptr, column_ptr,
                a_ring, b_ring, buffers, ready, empty, turns,
                M, N, K, first, length, pieces, origin,
                A_T, B_T, EPILOGUE, PIECES, SHARERS, ROWS, COLUMNS, DEPTH, GROUP, STAGES, SPLIT, BUFFERS,
            )),
            (_consume, (
                1, c_desc, c_ptr, strayed_ptr, window_ptr, row_ptr, column_ptr,
                a_ring, b_ring, buffers, ready, empty, turns,
                M, N, K, first, length, pieces, origin,
                A_T, B_T, EPILOGUE, PIECES, SHARERS, ROWS, COLUMNS, DEPTH, GROUP, STAGES, SPLIT, BUFFERS,
            )),
            (_produce, (
                a_desc, b_desc, a_ring, b_ring, ready, empty, M, N, K,
                A_T, B_T, SHARERS, ROWS, COLUMNS, DEPTH, GROUP, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
