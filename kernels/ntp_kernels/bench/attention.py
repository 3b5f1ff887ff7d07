"""Attention against cuDNN's, whose backward is not invariant to the number of heads in the call.

FLOP: 4 * H per visible (query, key) pair and head forward, 2.5 times that backward, whatever is recomputed.
"""

from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..attention import attention, attention_backward, document_bounds
from .rows import Row, interleaved, relative_error


@dataclass(frozen=True)
class _Shape:
    sequences: int
    seq_len: int
    units: int
    group: int
    size: int
    documents: int = 1

    @property
    def name(self) -> str:
        heads = f"{self.units * self.group}/{self.units} heads x {self.size}"
        return f"{self.sequences} x {self.seq_len}, {self.documents} doc, {heads}"

    @property
    def flop(self) -> float:
        length = self.seq_len / self.documents
        pairs = self.sequences * self.documents * length * (length + 1) / 2
        return 4.0 * pairs * self.units * self.group * self.size


_SHAPES = (
    _Shape(1, 8192, 8, 4, 128),
    _Shape(1, 8192, 2, 4, 128),
    _Shape(4, 2048, 8, 4, 128),
    _Shape(1, 8192, 8, 4, 128, documents=8),
    _Shape(1, 32768, 2, 4, 128),
    _Shape(1, 8192, 8, 4, 64),
)


def sections() -> list[Row]:
    """Forward and backward of every shape, against what torch has."""
    return [row for shape in _SHAPES for row in _measure(shape)]


def _measure(shape: _Shape) -> list[Row]:
    q, k, v, dout = _draw(shape)
    scale = shape.size**-0.5
    document = torch.arange(shape.seq_len, device="cuda") * shape.documents // shape.seq_len
    document = document.to(torch.int32).repeat(shape.sequences)
    bounds = document_bounds(document, shape.seq_len)
    out, lse = attention(q, k, v, document, shape.seq_len, scale, bounds)
    stock = _Stock(shape, q, k, v, dout) if shape.documents == 1 else None

    def forward() -> object:
        return attention(q, k, v, document, shape.seq_len, scale, bounds)

    def backward() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return attention_backward(dout, q, k, v, out, lse, document, shape.seq_len, scale, bounds)

    times = interleaved([forward, *([stock.forward] if stock else [])])
    back = interleaved([backward, *([stock.backward] if stock else [])])
    errors = _errors(shape, (q, k, v, dout), (out, *backward()))
    return [
        Row(
            "attention",
            kernel,
            shape.name,
            t[0],
            t[1] if stock else None,
            "cuDNN",
            flop,
            "flop",
            error,
            "relative",
        )
        for kernel, t, flop, error in (
            ("forward", times, shape.flop, errors[0]),
            ("backward", back, 2.5 * shape.flop, errors[1]),
        )
    ]


def _draw(shape: _Shape) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    tokens = shape.sequences * shape.seq_len
    query, key = (tokens, shape.units, shape.group, shape.size), (tokens, shape.units, shape.size)
    return [
        torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16)
        for s in (query, key, key, query)
    ]


class _Stock:
    """cuDNN through torch, on the same numbers in its own layout."""

    def __init__(
        self, shape: _Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
    ) -> None:
        def heads_first(x: torch.Tensor) -> torch.Tensor:
            return x.view(shape.sequences, shape.seq_len, -1, shape.size).transpose(1, 2)

        self.inputs = [heads_first(x).detach().requires_grad_() for x in (q, k, v)]
        self.dout = heads_first(dout)
        self.out = self.forward()

    def forward(self) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            q, k, v = self.inputs
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def backward(self) -> object:
        return torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)


def _errors(
    shape: _Shape, inputs: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...]
) -> tuple[float | None, float | None]:
    """Return the errors of out and of the worst of dq, dk, dv against float64; short sequences only."""
    if shape.seq_len > 8192:
        return None, None
    rows = slice(0, shape.seq_len)
    q, k, v, dout = (x[rows, 0].double() for x in inputs)
    position = torch.arange(shape.seq_len, device="cuda")
    document = position * shape.documents // shape.seq_len
    hidden = (position[None] > position[:, None]) | (document[None] != document[:, None])
    scores = torch.einsum("igh,jh->gij", q, k).mul_(shape.size**-0.5).masked_fill_(hidden, -torch.inf)
    p = scores.softmax(-1)
    del scores
    out = torch.einsum("gij,jh->igh", p, v)
    dv = torch.einsum("gij,igh->jh", p, dout)
    delta = (out * dout).sum(-1).t().unsqueeze(-1)
    ds = torch.einsum("igh,jh->gij", dout, v).sub_(delta).mul_(p).mul_(shape.size**-0.5)
    exact = (out, torch.einsum("gij,jh->igh", ds, k), torch.einsum("gij,igh->jh", ds, q), dv)
    errors = [relative_error(mine[rows, 0], truth) for mine, truth in zip(results, exact, strict=True)]
    return errors[0], max(errors[1:])
