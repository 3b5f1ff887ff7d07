"""Consecutive layers as CUDA graphs: forward and backward are captured once and replayed without the host.

A layer takes the host about as long to launch as a GPU to compute; a replay takes it microseconds. The bits
are those of the captured kernels, which are the same ones. The first microbatch of a shape runs eagerly: it
compiles kernels and makes memory for exchanges. Then all segments are captured, forwards in their
order and backwards in the reverse, so that graphs share memory in the order of their replay.

Addresses are part of a graph. Inputs are copied to fixed places; gradients go to the buffer of the gradient
group at hand, of which there are a few: each has graphs of its own, in the same memory.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ntp.collectives import Group
from ntp.pace import Pace
from ntp.weight import Weight

Tensors = tuple[Tensor, ...]

_AHEAD = 4
"""Replays that the host may be ahead of the device, where ranks wait for each other in them (`ntp.pace`)."""


@dataclass(frozen=True)
class Segment:
    """Layers, called as (*inputs) -> outputs with gradients for all of both, and the weights that they use.

    Whatever else `run` reads stays at its place. Each weight is used for the last time in a microbatch.
    """

    run: Callable[..., Tensors]
    weights: Sequence[Weight]


class GraphedSegments:
    """Segments one after the other, replayed from the second call on.

    Args:
        group: the ranks that they communicate with, by an exchange that can be captured.
    """

    def __init__(self, segments: Sequence[Segment], group: Group):
        self._segments, self._group = segments, group
        self._graphs: dict[tuple[Any, ...], list[_Graphs]] = {}
        self._studio = _Studio()
        self._warm: set[torch.Size] = set()
        self._places = group.exchange.places

    def __call__(self, *stream: Tensor) -> Tensors:
        """The outputs of the last segment for inputs of the first."""
        shape = stream[0].shape
        if not torch.is_grad_enabled() or shape not in self._warm:
            if torch.is_grad_enabled():
                self._warm.add(shape)
            for segment in self._segments:
                stream = segment.run(*stream)
            return stream
        if self._group.exchange.places != self._places:
            self._graphs.clear()
            self._studio = _Studio()  # memory whose last graph has gone takes no other
            self._places = self._group.exchange.places
        key = (self._segments[0].weights[0].grad.data_ptr(), shape)
        graphs = self._graphs.get(key)
        if graphs is None:
            graphs = self._graphs[key] = self._capture(stream)
        for graph in graphs:
            stream = _Replayed.apply(graph, *stream)  # type: ignore[assignment]
        return stream

    def _capture(self, stream: Tensors) -> list["_Graphs"]:
        self._group.exchange.flush()
        found: list[_Graphs] = []
        for segment in self._segments:
            found.append(_Graphs(segment, self._group, self._studio, stream, bool(found)))
            stream = found[-1].outputs
        grads: Tensors | None = None
        for graphs in reversed(found):
            grads = graphs.capture_backward(grads)
        return found


class _Studio:
    """Where graphs are recorded: one stream, since a backward runs in that of its forward, and one memory."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._pace = Pace(_AHEAD)

    def record(self, call: Callable[[], Tensors]) -> tuple[torch.cuda.CUDAGraph, Tensors]:
        """A graph of what `call` launches, and its results, which are there after a replay."""
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        torch.cuda.synchronize()
        gc.disable()  # freeing another graph in the midst would end the recording
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = call()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()  # left open, it would fail all that the device is asked next
                    raise
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph, result

    def keep_pace(self) -> None:
        """Wait until the device is at most a few replays behind."""
        mark = torch.cuda.Event()
        mark.record()
        self._pace.keep(mark)


class _Replayed(Function):
    @staticmethod
    def forward(ctx: Any, graphs: "_Graphs", *inputs: Tensor) -> Tensors:
        ctx.graphs = graphs
        return graphs.forward(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.graphs.backward(grads))


class _Graphs:
    """Forward and backward of one segment, which write gradients to one buffer.

    Args:
        in_place: `inputs` stay where they are, as the outputs of another segment do.
    """

    def __init__(
        self, segment: Segment, group: Group, studio: _Studio, inputs: Sequence[Tensor], in_place: bool
    ):
        self._weights, self._group, self._studio = segment.weights, group, studio
        self._inputs = [(x.detach() if in_place else torch.empty_like(x)).requires_grad_() for x in inputs]
        self._forward, self.outputs = self._capture(lambda: segment.run(*self._inputs))
        self._grads: Sequence[Tensor] = ()
        self._backward: _Captured | None = None
        self._input_grads: Tensors = ()

    def capture_backward(self, grads: Tensors | None) -> Tensors:
        """Record the backward, after those of all later segments; return the gradients of the inputs.

        `grads`: where those of the outputs will be, if another segment writes them.
        """
        self._grads = grads or [torch.empty_like(y) for y in self.outputs]
        self._backward, self._input_grads = self._capture(self._differentiate)
        self.outputs = tuple(y.detach() for y in self.outputs)
        return self._input_grads

    def forward(self, inputs: Sequence[Tensor]) -> Tensors:
        with torch.no_grad():
            _place(self._inputs, inputs)
        self._replay(self._forward)
        return tuple(y.detach() for y in self.outputs)

    def backward(self, grads: Sequence[Tensor]) -> Tensors:
        assert self._backward is not None
        self._group.exchange.flush()  # what others have left
        _place(self._grads, grads)
        self._replay(self._backward)
        for weight in self._weights:
            weight.announce_grad()
        return tuple(dx.detach() for dx in self._input_grads)

    def _replay(self, captured: "_Captured") -> None:
        captured.replay(self._weights, self._group)
        if self._group.size > 1:
            self._studio.keep_pace()

    def _differentiate(self) -> Tensors:
        found = torch.autograd.grad(self.outputs, self._inputs, self._grads)
        self._group.exchange.flush()
        return found

    def _capture(self, call: Callable[[], Tensors]) -> tuple["_Captured", Tensors]:
        """Record what `call` launches, without what it tells of gradients and products."""
        ready = [weight.on_grad_ready for weight in self._weights]
        counted = [weight.gemm_flops for weight in self._weights]
        for weight in self._weights:
            weight.on_grad_ready = None
        graph, result = self._studio.record(call)
        flops = [weight.gemm_flops - before for weight, before in zip(self._weights, counted, strict=True)]
        for weight, told, before in zip(self._weights, ready, counted, strict=True):
            weight.on_grad_ready, weight.gemm_flops = told, before
        return _Captured(graph, flops), result


class _Captured:
    """A graph, and the operations of products that it counts for each weight."""

    def __init__(self, graph: torch.cuda.CUDAGraph, flops: Sequence[int]):
        self._graph, self._flops = graph, flops

    def replay(self, weights: Sequence[Weight], group: Group) -> None:
        group.confirm()
        self._graph.replay()
        for weight, flops in zip(weights, self._flops, strict=True):
            weight.gemm_flops += flops


def _place(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for place, value in zip(places, values, strict=True):
        if place.data_ptr() != value.data_ptr():
            place.copy_(value)
