"""The training loop of one worker: what happens in a step, on any mesh.

`Trainer` knows no files, no processes and no environment; `ntp.worker` runs it in a real process,
`ntp.testing` in a thread. What it returns depends on the configuration, the data and the step alone.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ntp.balance import Balance, Measurement, is_worth_measuring
from ntp.collectives import Mesh
from ntp.config import Config, OptimizerConfig
from ntp.data import Batch, Datasets
from ntp.ddp import DistributedDataParallel, NonuniformTPDistributedDataParallel
from ntp.evidence import StateHashes, state_hashes
from ntp.layers import refresh_scales
from ntp.learning_rate import learning_rate
from ntp.model import Model
from ntp.optim import DistributedOptimizer, NonuniformTPOptimizer
from ntp.parameters import ParameterSpec, parameter_specs
from ntp.plan import Plan
from ntp.protocol import Phase
from ntp.reshard import holders
from ntp.stopwatch import Stopwatch, spare
from ntp.weight import Weight


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a committed step computed, the same on every worker.

    Attributes:
        loss: mean cross entropy of the global batch in nats, before the update.
        grad_norm: norm of the mean gradient, before clipping.
        tokens: target tokens in the global batch.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What a worker holds and computes: evidence that the work is really divided.

    Attributes:
        parameter_bytes: bytes of the parameters that the worker computes with.
        gemm_flops: floating-point operations of its products with weights, in this generation so far.
    """

    parameter_bytes: int
    gemm_flops: int


class NonFiniteGradientError(RuntimeError):
    """The gradient has a NaN or an infinity, also when it is computed again: it is the model's own."""


class Watch(Protocol):
    """Told what a worker is doing; may ask it to stop at the next step boundary."""

    def enter(self, phase: Phase, step: int) -> None:
        """The worker begins a phase. An exception raised here ends the step."""
        ...

    def microbatch(self, step: int, gradients: Tensor) -> None:
        """A microbatch begins; its gradients will be added to `gradients`, flat float32."""
        ...

    def wants_switch(self) -> bool:
        """Whether the workers are to leave the generation after the step under way."""
        ...


class _Unwatched:
    def enter(self, phase: Phase, step: int) -> None:
        del phase, step

    def microbatch(self, step: int, gradients: Tensor) -> None:
        del step, gradients

    def wants_switch(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _Ballot:
    """A step whose gradients this worker has, and whose norm it waits for."""

    step: int
    loss: float
    tokens: int
    learning_rate: float


class Trainer:
    """One worker of a job.

    Args:
        plan: who owns what; `mesh` are the groups that follow from it.
        datasets: what `ntp.data.open_datasets` returned.
        device: where to compute.
        watch: told of every phase.
        initialise: start from the initial weights; else the caller fills the state and calls `publish`.

    Attributes:
        committed: the last step whose update this worker has made; its result is in `result`.
        switch: the workers have agreed to leave the generation after the last step.
        balance: the shares by measured speed, from the step on in which they were agreed on.
        stopwatch: times the groups of each step.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        mesh: Mesh,
        datasets: Datasets,
        device: torch.device,
        watch: Watch | None = None,
        initialise: bool = True,
    ):
        self.config, self.plan, self.mesh = config, plan, mesh
        self.committed = 0
        self.result: StepResult | None = None
        self.switch = False
        self.balance: Balance | None = None
        self.stopwatch = Stopwatch(device)
        measures = config.parallel.balance == "measured" and is_worth_measuring(plan)
        self._measurement = Measurement(plan, mesh.rank) if measures else None
        self._ballot: _Ballot | None = None
        self._watch = watch or _Unwatched()
        self._datasets, self._device = datasets, device
        specs = parameter_specs(config.model)
        self.weights = make_weights(specs, plan, mesh.rank)
        self.ddp, self.optimizer = wrap(
            specs,
            self.weights,
            plan,
            mesh,
            config.optimizer,
            dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[config.train.dtype],
            device=device,
            overlap=config.parallel.overlap_exchange,
        )
        train = config.train
        graphs = train.cuda_graphs and device.type == "cuda"
        self.model = Model(config.model, self.weights, mesh.tensor, train.seq_len, train.recompute, graphs)
        if initialise:
            self.optimizer.initialise(config.train.seed, config.model.initializer_range)
            refresh_scales(self.weights.values(), mesh.tensor)

    def publish(self) -> None:
        """Renew the parameters that compute after a change of the masters; collective over the workers.

        Once before the first step, and once after each (`ntp.delivery.PushingDelivery`).
        """
        self.optimizer.return_parameters()
        refresh_scales(self.weights.values(), self.mesh.tensor)

    def retire(self) -> None:
        """Keep masters and moments alone, and never compute again: another layout needs the room."""
        self.model.retire()
        self.ddp.retire()
        self.optimizer.retire()

    def step(self, step: int, before_commit: Callable[[], None] = lambda: None) -> StepResult:
        """Run and commit step `step` (from 1); collective over the workers.

        `before_commit` is called when the gradients are there and the state is about to change.

        Raises:
            NonFiniteGradientError: the gradient is not finite, on every worker alike.
        """
        norm = self._vote(step, before_commit)
        if not math.isfinite(norm):  # a fault of one device does not come back, a fault of the model does
            norm = self._vote(step, before_commit)
        if not math.isfinite(norm):
            raise NonFiniteGradientError(
                f"step {step}: the gradient norm is {norm}, and again when recomputed"
            )
        self._watch.enter(Phase.UPDATE, step)
        result = self.finish(norm)
        self.publish()
        return result

    def _vote(self, step: int, before_commit: Callable[[], None]) -> float:
        """Compute the gradients of a step and agree on their norm."""
        self._watch.enter(Phase.STEP, step)
        figures = self._figures()
        self.stopwatch.start()
        losses = self._accumulate(step)
        self.stopwatch.stop()
        self._watch.enter(Phase.EXCHANGE, step)
        gradients = self.ddp.sync(self.optimizer.places)
        loss, tokens, self.switch, told = self._combine(losses, self.config.train.global_batch, figures)
        before_commit()
        rate = learning_rate(self.config.optimizer, step, self.config.train.steps)
        self._ballot = _Ballot(step, loss, tokens, rate)
        self._watch.enter(Phase.VOTE, step)
        norm = self.optimizer.vote(gradients, tokens)
        self._rebalance(told)  # not before the vote, which raises where what was told may be garbage
        return norm

    def finish(self, norm: float) -> StepResult:
        """Make the update that the vote on `norm` has decided; local.

        After a loss it completes the step of a worker that has voted but not heard the result.
        """
        ballot = self._ballot
        assert ballot is not None, "a worker that has not voted cannot be part of a committed step"
        self.optimizer.update(norm, ballot.tokens, ballot.learning_rate, ballot.step)
        self.committed, self._ballot = ballot.step, None
        self.result = StepResult(ballot.step, ballot.loss, norm, ballot.learning_rate, ballot.tokens)
        return self.result

    def evaluate(self) -> float:
        """Mean cross entropy of the held-out sequences; collective over the workers."""
        assert self._datasets.held_out is not None
        replicas, place = len(self.plan.replicas), self.plan.replicas.index(self.ddp.buffer.replica)
        losses: dict[int, tuple[Tensor, int]] = {}
        with torch.no_grad():
            for number in range(place, self.config.data.eval_sequences, replicas):
                batch = self._datasets.held_out.batch([number]).to(self._device)
                losses[number] = self.model.loss(batch), batch.target_tokens
        return self._combine(losses, self.config.data.eval_sequences)[0]

    def hashes(self) -> StateHashes:
        """Hashes of the whole state; collective over the workers."""
        return state_hashes(self.optimizer, self.mesh.workers)

    def usage(self) -> Usage:
        """Of the worker that uses most; collective over the workers."""
        weights = self.weights.values()
        held = sum(weight.data.numel() * weight.data.element_size() for weight in weights)
        flops = sum(weight.gemm_flops for weight in weights)
        largest = torch.tensor([held, flops], device=self._device)
        self.mesh.workers.all_reduce(largest, "max")
        parameter_bytes, gemm_flops = largest.tolist()
        self.mesh.workers.confirm()
        return Usage(parameter_bytes, gemm_flops)

    def _accumulate(self, step: int) -> dict[int, tuple[Tensor, int]]:
        """Losses and target tokens of this replica's microbatches, by the number of their first sequence."""
        train = self.config.train
        losses: dict[int, tuple[Tensor, int]] = {}
        for index in self.ddp.microbatches():
            self._watch.microbatch(step, self.ddp.buffer.gradients)
            batch = self.batch(step, index)
            loss = self.model.loss(batch)
            loss.sum().backward()
            losses[index * train.micro_batch] = loss.detach(), batch.target_tokens
        return losses

    def batch(self, step: int, index: int) -> Batch:
        """Microbatch `index` of step `step` (from 1): a function of the configuration alone."""
        train = self.config.train
        first = (step - 1) * train.global_batch + index * train.micro_batch
        return self._datasets.train.batch(range(first, first + train.micro_batch)).to(self._device)

    def _figures(self) -> Sequence[int]:
        """What this worker has to tell of the step before, all of which the device has completed."""
        if self._measurement is None:
            return ()
        room = spare(self._device, self.ddp.buffer.gradient_bytes)
        return self._measurement.figures(self.stopwatch.microseconds(), room)

    def _rebalance(self, told: Sequence[int]) -> None:
        """Take over other shares for what is computed next, once all workers have heard the last figures."""
        balance = self._measurement.hear(told) if self._measurement is not None else None
        if balance is not None:
            self.balance, self._measurement = balance, None
            if not balance.kept:
                self.plan = self.plan.with_shares(balance.shares)
                self.ddp.reassign(self.plan)

    def _combine(
        self, losses: Mapping[int, tuple[Tensor, int]], sequences: int, figures: Sequence[int] = ()
    ) -> tuple[float, int, bool, list[int]]:
        """Mean loss per token, tokens, whether anyone wants a switch, and the sums of all workers' figures.

        Sequences are added in canonical order.
        """
        bits = torch.zeros(sequences + len(figures) + 2, dtype=torch.int64, device=self._device)
        bits[-1] = self._watch.wants_switch()
        for place, figure in enumerate(figures, start=sequences):
            if figure:
                bits[place] = figure
        if self.mesh.tensor.rank == 0:
            for first, (loss, tokens) in losses.items():
                bits[first : first + loss.numel()] = loss.double().view(torch.int64)
                bits[-2] += tokens
        self.mesh.workers.all_reduce(bits)  # each sequence is non-zero on one rank: bits are kept
        bits = bits.cpu()
        self.mesh.workers.confirm()
        tokens = int(bits[-2])
        loss = math.fsum(bits[:sequences].view(torch.float64).tolist()) / tokens
        return loss, tokens, bool(bits[-1]), bits[sequences:-2].tolist() if figures else []


def make_weights(specs: Sequence[ParameterSpec], plan: Plan, rank: int) -> dict[str, Weight]:
    """A weight for every parameter, with this rank's units; the wrappers bind its storage."""
    replica = plan.replica_of(rank)

    def weights() -> Iterator[Weight]:
        for spec in specs:
            held = holders(spec, replica)[rank]
            yield Weight(spec.name, torch.empty(0), total_units=spec.units, first_unit=held.start)

    return {weight.name: weight for weight in weights()}


def wrap(
    specs: Sequence[ParameterSpec],
    weights: Mapping[str, Weight],
    plan: Plan,
    mesh: Mesh,
    optimizer: OptimizerConfig,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    overlap: bool = True,
) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    """The wrappers that fit the plan: the only place that asks whether the degrees are equal.

    Args:
        weights: what `make_weights` made; the wrappers bind their storage, which is still zero.
        dtype: the compute dtype.
        overlap: see `DistributedDataParallel`.
    """
    if plan.is_uniform:
        ddp_class, optimizer_class = DistributedDataParallel, DistributedOptimizer
    else:
        ddp_class, optimizer_class = NonuniformTPDistributedDataParallel, NonuniformTPOptimizer
    ddp = ddp_class(specs, weights, plan, mesh, dtype, device, overlap)
    return ddp, optimizer_class(ddp.buffer, mesh.workers, optimizer)
