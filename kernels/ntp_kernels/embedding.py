"""Vocabulary-sharded embedding lookup and its gradient.

Legend: M tokens, U local vocabulary units of V rows, D hidden size; unit `first_unit + u` holds the token ids
`(first_unit + u) * V ...`. The lookup copies bits: a token whose row lives elsewhere gives +0.0 bits, so
callers combine ranks by integer addition of bit patterns. The gradient uses no atomics: a row belongs to one
program, which adds the row's tokens in ascending token order, so its bits depend on that row's tokens only.
"""

# Triton types neither its launch keywords nor what its builtins return.
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# ruff: noqa: RUF005 - tuples grow by addition in Triton

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

_COLUMNS = 1024
_RUN = 12
_COUNTED = 1 << 14
"""More tokens than these go to a radix sort."""
_RANKED = 16
_AT_ONCE = 512
_RANK_WARPS = 8
_GRADIENT_COLUMNS = 512
_GRADIENT_WARPS = 2


def embedding(ids: torch.Tensor, w: torch.Tensor, first_unit: int) -> torch.Tensor:
    """Return the rows [M, D] of w [U, V, D] for ids i64 [M]; +0.0 bits where the row is not in this shard."""
    units, rows, hidden = w.shape
    assert w.is_contiguous()
    assert ids.is_contiguous()
    assert ids.dtype == torch.int64
    out = w.new_empty(ids.shape[0], hidden)
    columns = min(triton.next_power_of_2(hidden), _COLUMNS)
    _lookup_kernel[(ids.shape[0], triton.cdiv(hidden, columns))](
        ids, w, out, first_unit * rows, units * rows, D=hidden, COLUMNS=columns, num_warps=4
    )
    return out


def embedding_wgrad(ids: torch.Tensor, dy: torch.Tensor, first_unit: int, out: torch.Tensor) -> None:
    """Add to out f32 [U, V, D] the gradient of the rows that ids i64 [M] name, from dy [M, D].

    Order per row: its tokens in ascending order, left to right; the sum is then added to `out` once. Rows
    without a token are not touched.
    """
    units, rows, hidden = out.shape
    assert out.is_contiguous()
    assert out.dtype == torch.float32
    assert dy.is_contiguous()
    assert dy.shape == (ids.shape[0], hidden)
    sorted_ids, order = _sorted(ids)
    columns = min(triton.next_power_of_2(hidden), _GRADIENT_COLUMNS)
    _gradient_kernel[(ids.shape[0], triton.cdiv(hidden, columns))](
        sorted_ids, order, dy, out, first_unit * rows, units * rows, ids.shape[0],
        D=hidden, RUN=_RUN, COLUMNS=columns, num_warps=_GRADIENT_WARPS,
    )  # fmt: skip


def _sorted(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids i64 [M] in ascending order, i32, and the token of each, i32; equal ids keep token order.

    Counting, in one launch, how many tokens come before each takes M^2 comparisons: 8192 tokens are sorted
    before a radix sort has launched its passes. A stable sort has one result, whatever the algorithm.
    """
    tokens = ids.shape[0]
    if tokens > _COUNTED:
        sorted_ids, order = torch.sort(ids.to(torch.int32), stable=True)
        return sorted_ids, order.to(torch.int32)
    sorted_ids, order = (torch.empty(tokens, dtype=torch.int32, device=ids.device) for _ in range(2))
    _rank_kernel[(triton.cdiv(tokens, _RANKED),)](
        ids, sorted_ids, order, tokens, MINE=_RANKED, OTHERS=_AT_ONCE, num_warps=_RANK_WARPS
    )
    return sorted_ids, order


def probe(device: torch.device) -> Iterator[torch.Tensor]:
    """Yield fixed results for `selftest.fingerprint`."""
    from .selftest import pattern

    ids = torch.arange(60, device=device) * 7 % 40
    dy, w = pattern((60, 64), device, 61), pattern((2, 16, 64), device, 62)
    out = torch.zeros(w.shape, device=device)
    embedding_wgrad(ids, dy, 0, out)
    yield from (embedding(ids, w, 0), out)


@triton.jit(do_not_specialize=["first_row", "rows"])
def _lookup_kernel(ids_ptr, w_ptr, out_ptr, first_row, rows, D: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(ids_ptr + token) - first_row
    owned = (row >= 0) & (row < rows)
    value = tl.load(w_ptr + row * D + column, mask=owned & (column < D), other=0.0)
    tl.store(out_ptr + token * D + column, value, mask=column < D)


@triton.jit(do_not_specialize=["tokens"])
def _rank_kernel(ids_ptr, sorted_ptr, order_ptr, tokens, MINE: tl.constexpr, OTHERS: tl.constexpr):
    """Write MINE tokens where they belong: behind smaller ids and behind equal ids of earlier tokens."""
    first = tl.program_id(0) * MINE
    token = first + tl.arange(0, MINE)[:, None]
    mine = tl.load(ids_ptr + token, mask=token < tokens, other=0).to(tl.int32)
    block = first // OTHERS * OTHERS
    behind = tl.zeros([MINE, OTHERS], tl.int32)  # negative; a sign is cheaper to add than a comparison
    for start in range(0, block, OTHERS):
        behind += (_ids(ids_ptr, start, tokens, OTHERS) - (mine + 1)) >> 31
    earlier = block + tl.arange(0, OTHERS)[None, :] < token
    behind += (_ids(ids_ptr, block, tokens, OTHERS) - (mine + earlier.to(tl.int32))) >> 31
    for start in range(block + OTHERS, tokens, OTHERS):
        behind += (_ids(ids_ptr, start, tokens, OTHERS) - mine) >> 31
    place = -tl.sum(behind, axis=1)[:, None]
    tl.store(sorted_ptr + place, mine, mask=token < tokens)
    tl.store(order_ptr + place, token, mask=token < tokens)


@triton.jit
def _ids(ids_ptr, start, tokens, COUNT: tl.constexpr):
    """The ids [1, COUNT] from token `start`; the largest number behind the last token."""
    token = start + tl.arange(0, COUNT)[None, :]
    return tl.load(ids_ptr + token, mask=token < tokens, other=2147483647).to(tl.int32)


@triton.jit(do_not_specialize=["first_row", "rows", "tokens"])
def _gradient_kernel(
    ids_ptr, order_ptr, dy_ptr, out_ptr, first_row, rows, tokens,
    D: tl.constexpr, RUN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0)
    name = tl.load(ids_ptr + start)
    before = tl.load(ids_ptr + start - 1, mask=start > 0, other=-1)
    after = tl.load(ids_ptr + start + 1, mask=start + 1 < tokens, other=-1)
    token = tl.load(order_ptr + start)
    row = name - first_row
    if (name != before) & (row >= 0) & (row < rows):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        target = out_ptr + row.to(tl.int64) * D + column
        current = tl.load(target, mask=column < D, other=0.0)
        total = tl.load(dy_ptr + token.to(tl.int64) * D + column, mask=column < D, other=0.0).to(tl.float32)
        position = start + 1
        more = after == name
        while more:
            mine, rows_of_dy, dy = (), (), ()
            for i in tl.static_range(RUN):  # in three rounds: the loads of a round are in flight together
                slot = position + i
                mine = mine + (tl.load(ids_ptr + slot, mask=slot < tokens, other=-1) == name,)
                other = tl.load(order_ptr + slot, mask=slot < tokens, other=0).to(tl.int64)
                rows_of_dy = rows_of_dy + (dy_ptr + other * D + column,)
            for i in tl.static_range(RUN):
                dy = dy + (tl.load(rows_of_dy[i], mask=mine[i] & (column < D), other=0.0),)
            for i in tl.static_range(RUN):
                total += dy[i].to(tl.float32)
            position += RUN
            more = tl.load(ids_ptr + position, mask=position < tokens, other=-1) == name
        tl.store(target, current + total, mask=column < D)
