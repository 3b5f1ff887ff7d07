"""Consecutive layers as CUDA graphs: forward and backward are captured once and replayed without the host.

A layer takes the host about as long to launch as a GPU to compute; a replay takes it microseconds. The bits
are those of the captured kernels, which are the same ones. What is captured when: the first microbatch runs
eagerly (it compiles kernels and makes memory for exchanges); the second captures each forward when it comes
to it, and each backward when it comes to that, so that graphs share memory in the order of their replay.

Addresses are part of a graph. Inputs are copied to fixed places; gradients go to the buffer of the gradient
group at hand, of which there are a few: each has graphs of its own, in the same memory.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ntp.collectives import Group
from ntp.weight import Weight

Layers = Callable[..., tuple[Tensor, ...]]


class GraphedLayers:
    """Layers, called as (*inputs) -> outputs, with gradients for all; replayed from the second call on.

    Args:
        layers: what is called; whatever else it reads must stay at its place.
        weights: all weights that it uses, each for the last time in a microbatch.
        group: the ranks that it communicates with.
        studio: that of all layers of a model.
    """

    def __init__(self, layers: Layers, weights: Sequence[Weight], group: Group, studio: "Studio"):
        self._layers, self._weights, self._group, self._studio = layers, weights, group, studio
        self._graphs: dict[tuple[Any, ...], _Graphs] = {}
        self._is_warm = False

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled() or not self._group.exchange.can_be_captured:
            return self._layers(*inputs)
        if not self._is_warm:
            self._is_warm = True
            return self._layers(*inputs)
        key = (self._weights[0].grad.data_ptr(), *(tuple(x.shape) for x in inputs))
        graphs = self._graphs.get(key)
        if graphs is None:
            graphs = self._graphs[key] = _Graphs(
                self._layers, self._weights, self._group, self._studio, inputs
            )
        return _Replayed.apply(graphs, *inputs)  # type: ignore[return-value]


class Studio:
    """Where graphs are recorded: one stream, since a backward runs in that of its forward, and one memory."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def record(
        self, call: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        """A graph of what `call` launches, and its results, which are there after a replay."""
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        self._stream.wait_stream(torch.cuda.current_stream())
        gc.disable()  # freeing another graph in the midst would end the recording
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = call()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph, result


class _Replayed(Function):
    @staticmethod
    def forward(ctx: Any, graphs: "_Graphs", *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.graphs = graphs
        return graphs.forward(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.graphs.backward(grads))


class _Graphs:
    """A forward and a backward graph that write gradients to one buffer."""

    def __init__(
        self,
        layers: Layers,
        weights: Sequence[Weight],
        group: Group,
        studio: "Studio",
        inputs: Sequence[Tensor],
    ):
        self._weights, self._group, self._studio = weights, group, studio
        self._inputs = [torch.empty_like(x).requires_grad_() for x in inputs]
        with torch.enable_grad():
            self._forward, self._outputs = self._capture(lambda: layers(*self._inputs))
        self._grads = [torch.empty_like(y) for y in self._outputs]
        self._backward: _Captured | None = None
        self._input_grads: tuple[Tensor, ...] = ()

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            _place(self._inputs, inputs)
        self._forward.replay(self._weights, self._group)
        return tuple(y.detach() for y in self._outputs)

    def backward(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self._group.exchange.flush()  # what others have left
        if self._backward is None:
            self._backward, self._input_grads = self._capture(self._differentiate)
        _place(self._grads, grads)
        self._backward.replay(self._weights, self._group)
        for weight in self._weights:
            weight.announce_grad()
        return tuple(dx.detach() for dx in self._input_grads)

    def _differentiate(self) -> tuple[Tensor, ...]:
        found = torch.autograd.grad(self._outputs, self._inputs, self._grads)
        self._group.exchange.flush()
        return found

    def _capture(self, call: Callable[[], tuple[Tensor, ...]]) -> tuple["_Captured", tuple[Tensor, ...]]:
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
