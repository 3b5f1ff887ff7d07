"""The GEMM for Hopper: one warp-specialised kernel, three epilogues.

A program keeps one producer warp and two consumer warpgroups. The producer feeds a ring of shared-memory
stages by TMA and runs ahead over tile borders; the consumers multiply with `wgmma` and write out. In `hopper`
tiles each consumer has half of the rows, or a third of 192, and the epilogues overlap with little else; in
`pingpong` tiles, half as large, the consumers take turns, so that one's epilogue hides behind the other's
products, at the price of more traffic from L2. With a TAIL, the tiles that do not fill a last round of all
programs are cut into TAIL parts of their columns, which do.

Invariant: every output element is one chain of k16 steps in ascending k, started from a value that depends on
the element alone. Tile, stages and grid therefore move no bits (`tests/kernels/test_gemm_gpu.py`), and the
plain kernels in `gemm_plain.py` give the same ones.

Epilogues: `store` rounds to the output's dtype; `add` adds to an fp32 output (one IEEE addition per element);
`chain` starts the accumulator at +-1.5 * 2^E and stores its integer (see `cut.py`). Where a piece of a chain
ends, a consumer looks whether any integer of its part has left its window; if so it banks them all, in memory
of its own, and begins afresh. What is banked is added at the end: the sums stay what they were.

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

from .gemm_hopper_epilogue import add, bank, chain_start, crossed, fresh, read_ahead, strays, write


@gluon.jit
def _tile_of(tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Row and column of a tile: GROUP tile rows at a time, for neighbours to share operands in L2."""
    per_group = GROUP * tiles_n
    first = tile // per_group * GROUP
    size = min(tiles_m - first, GROUP)
    return first + (tile % per_group) % size, (tile % per_group) // size


@gluon.jit
def _span(tiles, TAIL: gl.constexpr, PARTS: gl.constexpr):
    """First and last item of the rounds of whole tiles (PARTS 1), or of the last round's parts."""
    whole = tiles
    if TAIL > 1:
        whole = tiles // gl.num_programs(0) * gl.num_programs(0)
    if PARTS == 1:
        return 0, whole
    else:
        return whole * PARTS, tiles * PARTS


@gluon.jit
def _feed(
    step, a_desc, b_desc, a_ring, b_ring, ready, empty, M, N, K,
    A_T: gl.constexpr, B_T: gl.constexpr, SHARERS: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, TAIL: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """`_produce` for whole tiles (PARTS 1) or for the parts of the last ones (PARTS TAIL)."""
    tiles_m = gl.cdiv(M, SHARERS * ROWS)
    tiles_n = gl.cdiv(N, COLUMNS)
    begin, end = _span(tiles_m * tiles_n, TAIL, PARTS)
    for item in range(begin + gl.program_id(0), end, gl.num_programs(0)):
        tile_m, tile_n = _tile_of(item // PARTS, tiles_m, tiles_n, GROUP)
        m = tile_m * SHARERS * ROWS
        n = tile_n * COLUMNS + item % PARTS * (COLUMNS // PARTS)
        for k in range(0, K, DEPTH):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            full = ready.index(stage)
            mbarrier.expect(
                full, a_desc.block_type.nbytes * SHARERS + b_desc.block_type.nbytes * (TAIL // PARTS)
            )
            for half in gl.static_range(SHARERS):
                if A_T:
                    a_at = [k, m + half * ROWS]
                else:
                    a_at = [m + half * ROWS, k]
                tma.async_copy_global_to_shared(a_desc, a_at, full, a_ring.index(SHARERS * stage + half))
            for part in gl.static_range(TAIL // PARTS):
                if B_T:
                    b_at = [n + part * (COLUMNS // TAIL), k]
                else:
                    b_at = [k, n + part * (COLUMNS // TAIL)]
                tma.async_copy_global_to_shared(b_desc, b_at, full, b_ring.index(TAIL * stage + part))
            step += 1
    return step


@gluon.jit
def _produce(
    a_desc, b_desc, a_ring, b_ring, ready, empty, M, N, K,
    A_T: gl.constexpr, B_T: gl.constexpr, SHARERS: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Fill the ring, tile after tile. A stage: a block of `a` for each sharer of the tile and one of `b`."""
    step = 0
    step = _feed(
        step, a_desc, b_desc, a_ring, b_ring, ready, empty, M, N, K,
        A_T, B_T, SHARERS, ROWS, COLUMNS, DEPTH, GROUP, STAGES, TAIL, 1,
    )  # fmt: skip
    if TAIL > 1:
        step = _feed(
            step, a_desc, b_desc, a_ring, b_ring, ready, empty, M, N, K,
            A_T, B_T, SHARERS, ROWS, COLUMNS, DEPTH, GROUP, STAGES, TAIL, TAIL,
        )  # fmt: skip


@gluon.jit
def _multiply(
    accumulator, step, begin, end, a_ring, b_ring, ready, empty, turns,
    LAST: gl.constexpr, HALF: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr, SHARERS: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr, STRIDE: gl.constexpr,
):  # fmt: skip
    """Carry the chains over k in [begin, end). One product is in flight; the stage before it is given back.

    LAST: the tile ends here, and the other consumer may take its turn.
    """
    first = step
    for _ in range(begin, end, DEPTH):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        if SHARERS > 1:
            a = a_ring.index(SHARERS * stage + HALF)
        else:
            a = a_ring.index(stage)
        b = b_ring.index(STRIDE * stage)
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
def _consume(
    HALF: gl.constexpr, c_desc, c_ptr, bank_ptr, window_ptr, row_ptr, column_ptr,
    a_ring, b_ring, buffers, ready, empty, turns,
    M, N, K, first, length, pieces, phase, period, origin,
    A_T: gl.constexpr, B_T: gl.constexpr, EPILOGUE: gl.constexpr, PIECES: gl.constexpr, SHARERS: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, BUFFERS: gl.constexpr, PRELOAD: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Multiply and write a share of the rows of every tile, or every other tile (SHARERS 1).

    The ring of `b` is allocated in parts; whole tiles see it in whole blocks, which are the same memory.
    """
    if B_T:
        shape: gl.constexpr = [STAGES, COLUMNS, DEPTH]
    else:
        shape: gl.constexpr = [STAGES, DEPTH, COLUMNS]
    step = 0
    if SHARERS == 1:
        step = HALF * gl.cdiv(K, DEPTH)
    step = _sweep(
        HALF, step, c_desc, c_ptr, bank_ptr, window_ptr, row_ptr, column_ptr,
        a_ring, b_ring._reinterpret(b_ring.dtype, shape, b_ring.layout), buffers, ready, empty, turns,
        M, N, K, first, length, pieces, phase, period, origin,
        A_T, B_T, EPILOGUE, PIECES, SHARERS, ROWS, COLUMNS, DEPTH, GROUP, STAGES, SPLIT, BUFFERS, PRELOAD,
        TAIL, 1,
    )  # fmt: skip
    if TAIL > 1:
        step = _sweep(
            HALF, step, c_desc, c_ptr, bank_ptr, window_ptr, row_ptr, column_ptr,
            a_ring, b_ring, buffers, ready, empty, turns,
            M, N, K, first, length, pieces, phase, period, origin,
            A_T, B_T, EPILOGUE, PIECES, SHARERS, ROWS, COLUMNS, DEPTH, GROUP, STAGES, SPLIT, BUFFERS, PRELOAD,
            TAIL, TAIL,
        )  # fmt: skip
    tma.store_wait(pendings=0)


@gluon.jit
def _sweep(
    HALF: gl.constexpr, step, c_desc, c_ptr, bank_ptr, window_ptr, row_ptr, column_ptr,
    a_ring, b_ring, buffers, ready, empty, turns,
    M, N, K, first, length, pieces, phase, period, origin,
    A_T: gl.constexpr, B_T: gl.constexpr, EPILOGUE: gl.constexpr, PIECES: gl.constexpr, SHARERS: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, BUFFERS: gl.constexpr, PRELOAD: gl.constexpr, TAIL: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """`_consume` for whole tiles (PARTS 1) or for the parts of the last ones (PARTS TAIL)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS // PARTS, 16]
    )
    tiles_m = gl.cdiv(M, SHARERS * ROWS)
    tiles_n = gl.cdiv(N, COLUMNS)
    begin_item, end_item = _span(tiles_m * tiles_n, TAIL, PARTS)
    if SHARERS > 1:
        start = begin_item + gl.program_id(0)
        stride = gl.num_programs(0)
        row_offset = HALF * ROWS
        others = 0
    else:
        start = gl.program_id(0) + HALF * gl.num_programs(0)
        stride = 2 * gl.num_programs(0)
        row_offset = 0
        others = gl.cdiv(K, DEPTH)
    bank_ptr += (gl.program_id(0) * max(SHARERS, 2) + HALF) * (ROWS * COLUMNS)
    minus = ((phase + pieces - 1) // period) & 1
    turn = 0
    for item in range(start, end_item, stride):
        tile_m, tile_n = _tile_of(item // PARTS, tiles_m, tiles_n, GROUP)
        m = tile_m * SHARERS * ROWS + row_offset
        n = tile_n * COLUMNS + item % PARTS * (COLUMNS // PARTS)
        if EPILOGUE == "chain":
            accumulator = chain_start(
                row_ptr, column_ptr, (phase // period) & 1, m, n, M, N, ROWS, COLUMNS, layout
            )  # fmt: skip
        else:
            accumulator = gl.zeros((ROWS, COLUMNS // PARTS), gl.float32, layout)
        if SHARERS == 1:
            # This also makes the parity of `ready` unambiguous: the other consumer saw every earlier stage.
            mbarrier.wait(turns.index(HALF), (turn & 1) ^ (1 - HALF))
            turn += 1
        banked = 0
        if PIECES:
            rows = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
            window = gl.load(window_ptr + rows, mask=rows < M, other=0)
            for piece in range(pieces - 1):
                begin = max(first + (piece - 1) * length, 0)
                end = first + piece * length
                accumulator, step = _multiply(
                    accumulator, step, begin, end, a_ring, b_ring, ready, empty, turns,
                    False, HALF, A_T, B_T, SHARERS, DEPTH, STAGES, TAIL if PARTS > 1 else 1,
                )  # fmt: skip
                if strays(accumulator, window):
                    bank(bank_ptr, banked, accumulator, ((phase + piece) // period) & 1, SPLIT // PARTS)
                    accumulator = fresh(accumulator)
                    banked = 1
                if (phase + piece + 1) % period == 0:
                    accumulator = crossed(accumulator)
            begin = max(first + (pieces - 2) * length, 0)
        else:
            begin = 0
        if EPILOGUE == "add":
            # Read here, so that its latency hides behind the products.
            ahead = read_ahead(c_ptr, accumulator, m, n, M, N, PRELOAD, SPLIT // PARTS)
        accumulator, step = _multiply(
            accumulator, step, begin, K, a_ring, b_ring, ready, empty, turns,
            True, HALF, A_T, B_T, SHARERS, DEPTH, STAGES, TAIL if PARTS > 1 else 1,
        )  # fmt: skip
        step += others
        if EPILOGUE == "add":
            add(
                c_desc, c_ptr, buffers, accumulator, ahead, m, n, M, N, HALF, SPLIT // PARTS, BUFFERS, PRELOAD
            )  # fmt: skip
        else:
            write(
                c_desc, buffers, accumulator, minus, origin, bank_ptr, banked, m, n,
                HALF, EPILOGUE, PIECES, SPLIT // PARTS, BUFFERS,
            )  # fmt: skip
    return step


@gluon.jit(do_not_specialize=["M", "K", "first", "length", "pieces", "phase", "period", "origin"])
def gemm_kernel(
    a_desc, b_desc, c_desc, c_ptr, bank_ptr, window_ptr, row_ptr, column_ptr,
    M, N, K, first, length, pieces, phase, period, origin,
    A_T: gl.constexpr, B_T: gl.constexpr, EPILOGUE: gl.constexpr, PIECES: gl.constexpr, SHARERS: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, BUFFERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, PRELOAD: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Persistent: two or three consumer warp groups and a producer, which fills the rings that they empty.

    a is [M, K], [K, M] where A_T; b is [K, N], [N, K] where B_T. The contract and the order of sums are in
    `gemm_hopper`.
    """
    a_ring = gl.allocate_shared_memory(
        gl.bfloat16, [SHARERS * STAGES] + a_desc.block_type.shape, a_desc.layout
    )
    b_ring = gl.allocate_shared_memory(gl.bfloat16, [TAIL * STAGES] + b_desc.block_type.shape, b_desc.layout)
    buffers = gl.allocate_shared_memory(
        c_desc.dtype, [max(SHARERS, 2) * BUFFERS] + c_desc.block_type.shape, c_desc.layout
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=SHARERS)
    fence_async_shared()  # the copy engine must see the barriers
    consumer = (
        c_desc, c_ptr, bank_ptr, window_ptr, row_ptr, column_ptr,
        a_ring, b_ring, buffers, ready, empty, turns,
        M, N, K, first, length, pieces, phase, period, origin,
    )  # fmt: skip
    consumer_constants: gl.constexpr = (
        A_T, B_T, EPILOGUE, PIECES, SHARERS, ROWS, COLUMNS, DEPTH, GROUP, STAGES, SPLIT, BUFFERS,
        PRELOAD, TAIL,
    )  # fmt: skip
    producer = (a_desc, b_desc, a_ring, b_ring, ready, empty, M, N, K)
    producer_constants: gl.constexpr = (A_T, B_T, SHARERS, ROWS, COLUMNS, DEPTH, GROUP, STAGES, TAIL)
    if SHARERS == 3:
        gl.warp_specialize(
            [
                (_consume, (0,) + consumer + consumer_constants),
                (_consume, (1,) + consumer + consumer_constants),
                (_consume, (2,) + consumer + consumer_constants),
                (_produce, producer + producer_constants),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0,) + consumer + consumer_constants),
                (_consume, (1,) + consumer + consumer_constants),
                (_produce, producer + producer_constants),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
