"""Everything that moves bytes: each kernel, from a graph, against a device copy of as many bytes.

A ratio is therefore the share of the copy bandwidth that a kernel reaches. Bytes count every tensor of the
contract once, read or written; scratch is not counted. Cross entropy counts its logits three times (read,
read, write). Shapes are those of Llama-3-8B with 8192 tokens on one rank of a tensor-parallel group of four.
"""

from collections.abc import Callable

import torch

from ..adamw import adamw, square_sums
from ..cross_entropy import ce_backward, ce_statistics, ce_sums
from ..embedding import embedding, embedding_wgrad
from ..norm import add_rms_norm, rms_norm, rms_norm_backward
from ..rope import qk_norm_rope, qk_norm_rope_backward
from ..swiglu import swiglu, swiglu_backward
from .rows import Row, interleaved

_TOKENS = 8192
_Case = tuple[str, str, int, Callable[[], object]]


def sections() -> list[Row]:
    """Everything that is bound by memory: norms, rotary embedding, SwiGLU, losses, embedding, optimizer."""
    builders = (_norm, _rope, _swiglu, _cross_entropy, _embedding, _optimizer)
    return [_measure(*case) for build in builders for case in build()]


def _measure(kernel: str, shape: str, amount: int, call: Callable[[], object]) -> Row:
    source = torch.empty(amount // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ours, copy = interleaved([_captured(call), lambda: target.copy_(source)])
    return Row("pointwise", kernel, shape, ours, copy, "copy of as many bytes", amount, "byte")


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of a graph of one call: the GPU's time, without the host's for a launch."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _norm() -> list[_Case]:
    cases: list[_Case] = []
    for hidden in (4096, 8192):
        x, dy, weight = _draw(_TOKENS, hidden), _draw(_TOKENS, hidden), _draw(hidden)
        residual, rstd = _draw(_TOKENS, hidden), rms_norm(x, weight, 1e-5)[1]
        shape = f"[{_TOKENS}, {hidden}]"
        cases += [
            ("rms_norm", shape, 2 * _bytes(x), lambda x=x, w=weight: rms_norm(x, w, 1e-5)),
            (
                "add_rms_norm", shape, 4 * _bytes(x),
                lambda x=x, r=residual, w=weight: add_rms_norm(x, r, w, 1e-5),
            ),
            (
                "rms_norm_backward", shape, 3 * _bytes(x),
                lambda dy=dy, x=x, w=weight, s=rstd: rms_norm_backward(dy, x, w, s),
            ),
            (
                "same + residual", shape, 4 * _bytes(x),
                lambda g=dy, x=x, w=weight, s=rstd, r=residual: rms_norm_backward(g, x, w, s, r),
            ),
        ]  # fmt: skip
    return cases


def _rope() -> list[_Case]:
    return [case for units in (2, 8) for weight in (None, _draw(128)) for case in _rotation(units, weight)]


def _rotation(units: int, weight: torch.Tensor | None) -> list[_Case]:
    group, size = 4, 128
    qkv = _draw(_TOKENS, units, group + 2, size)
    positions = torch.arange(_TOKENS, device="cuda", dtype=torch.int32)
    angle = positions[:, None] / 5e5 ** (torch.arange(0, size, 2, device="cuda") / size)
    cos, sin = angle.cos(), angle.sin()
    q, k, v, rstd = qk_norm_rope(qkv, positions, cos, sin, weight, weight, 1e-6)
    name, shape = "rope" if weight is None else "qk_norm_rope", f"[{_TOKENS}, {units}, {group + 2}, {size}]"
    # Without a norm the backward does not need qkv itself.
    moved = (2 if weight is None else 3) * _bytes(qkv) + _bytes(cos, sin)
    return [
        (
            name, shape, 2 * _bytes(qkv) + _bytes(cos, sin),
            lambda: qk_norm_rope(qkv, positions, cos, sin, weight, weight, 1e-6),
        ),
        (
            f"{name}_backward", shape, moved,
            lambda: qk_norm_rope_backward(q, k, v, qkv, positions, cos, sin, weight, weight, rstd),
        ),
    ]  # fmt: skip


def _swiglu() -> list[_Case]:
    cases: list[_Case] = []
    for units, width in ((14, 256), (1, 3584)):
        gate_up, dy = _draw(_TOKENS, units, 2, width), _draw(_TOKENS, units, width)
        shape = f"[{_TOKENS}, {units}, 2, {width}]"
        cases += [
            ("swiglu", shape, _bytes(gate_up, dy), lambda g=gate_up: swiglu(g)),
            (
                "swiglu_backward", shape, 2 * _bytes(gate_up) + _bytes(dy),
                lambda d=dy, g=gate_up: swiglu_backward(d, g),
            ),
        ]  # fmt: skip
    return cases


def _cross_entropy() -> list[_Case]:
    units, width, vocab = 16, 2016, 128256
    logits = _draw(_TOKENS, units, width)
    targets = torch.randint(0, vocab, (_TOKENS,), device="cuda")
    row_max, statistics = ce_statistics(logits, 0, vocab)
    lse = row_max + 1
    out = torch.empty_like(logits)

    def everything() -> None:
        top, local = ce_statistics(logits, 0, vocab)
        ce_sums(logits, top, targets, 0, vocab, local)
        ce_backward(logits, lse, targets, 0, vocab, out)

    shape = f"[{_TOKENS}, {units}, {width}]"
    return [
        ("ce_statistics", shape, _bytes(logits), lambda: ce_statistics(logits, 0, vocab)),
        (
            "ce_sums", shape, _bytes(statistics),
            lambda: ce_sums(logits, row_max, targets, 0, vocab, statistics),
        ),
        (
            "ce_backward", shape, 2 * _bytes(logits),
            lambda: ce_backward(logits, lse, targets, 0, vocab, out),
        ),
        ("cross entropy, all", shape, 3 * _bytes(logits), everything),
    ]  # fmt: skip


def _embedding() -> list[_Case]:
    units, width, hidden = 16, 2016, 4096
    w, dy = _draw(units, width, hidden), _draw(_TOKENS, hidden)
    out = torch.zeros(units, width, hidden, device="cuda")
    ids = torch.randint(0, units * width, (_TOKENS,), device="cuda")
    rows = ids.unique().numel() * hidden * 4
    shape = f"[{_TOKENS}] of [{units}, {width}, {hidden}]"
    return [
        ("embedding", shape, 2 * _bytes(dy), lambda: embedding(ids, w, 0)),
        ("embedding_wgrad", shape, _bytes(dy) + 2 * rows, lambda: embedding_wgrad(ids, dy, 0, out)),
    ]


def _optimizer() -> list[_Case]:
    count = 1 << 26
    master, m, grad = (_draw(count, dtype=torch.float32) for _ in range(3))
    v, copy = grad.square(), torch.empty(count, device="cuda", dtype=torch.bfloat16)
    blocks = grad.view(-1, 1 << 16)
    return [
        (
            "adamw", f"[{count}]", 7 * _bytes(grad) + _bytes(copy),
            lambda: adamw(master, m, v, grad, 1e-4, 0.9, 0.95, 1e-8, 0.1, 7, copy=copy),
        ),
        ("square_sums", f"{list(blocks.shape)}", _bytes(grad), lambda: square_sums(blocks)),
    ]  # fmt: skip
