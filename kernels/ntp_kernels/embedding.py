"""Vocabulary-sharded embedding lookup and its gradient.

Legend: M tokens, U local vocabulary units of V rows, D hidden size; unit `first_unit + u` holds the token ids
`(first_unit + u) * V ...`. The lookup copies bits: a token whose row lives elsewhere gives +0.0 bits, so
callers combine ranks by integer addition of bit patterns. The gradient uses no atomics: a row belongs to one
program, which adds the row's tokens in ascending token order, so its bits depend on that row's tokens only.
"""

# Triton types neither its launch keywords nor what its builtins return.
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

_COLUMNS = 1024
_RUN = 8


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

    Order per row: its tokens in ascending order, runs of 8 by one fixed tree (short run padded with zeros),
    runs left to right from zero; the sum is then added to `out` once. Rows without a token are not touched.
    """
    units, rows, hidden = out.shape
    assert out.is_contiguous()
    assert out.dtype == torch.float32
    assert dy.is_contiguous()
    assert dy.shape == (ids.shape[0], hidden)
    # A stable sort has one possible result: equal ids keep token order, whatever the algorithm.
    # Sorted as i32, in half the time of i64.
    sorted_ids, order = torch.sort(ids.to(torch.int32), stable=True)
    columns = min(triton.next_power_of_2(hidden), _COLUMNS)
    _gradient_kernel[(ids.shape[0], triton.cdiv(hidden, columns))](
        sorted_ids, order, dy, out, first_unit * rows, units * rows, ids.shape[0],
        D=hidden, RUN=_RUN, COLUMNS=columns, num_warps=4,
    )  # fmt: skip


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


@triton.jit(do_not_specialize=["first_row", "rows", "tokens"])
def _gradient_kernel(
    ids_ptr, order_ptr, dy_ptr, out_ptr, first_row, rows, tokens,
    D: tl.constexpr, RUN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0)
    name = tl.load(ids_ptr + start)
    before = tl.load(ids_ptr + start - 1, mask=start > 0, other=-1)
    row = name - first_row
    if (name != before) & (row >= 0) & (row < rows):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros([COLUMNS], tl.float32)
        position = start
        more = True
        while more:
            slots = position + tl.arange(0, RUN)
            mine = tl.load(ids_ptr + slots, mask=slots < tokens, other=-1) == name
            token = tl.load(order_ptr + slots, mask=mine, other=0)
            inside = mine[:, None] & (column < D)[None, :]
            dy = tl.load(dy_ptr + token[:, None] * D + column[None, :], mask=inside, other=0.0)
            total += tl.sum(dy.to(tl.float32), axis=0)
            position += RUN
            more = tl.load(ids_ptr + position, mask=position < tokens, other=-1) == name
        target = out_ptr + row * D + column
        tl.store(target, tl.load(target, mask=column < D, other=0.0) + total, mask=column < D)
