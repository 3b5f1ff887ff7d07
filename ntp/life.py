"""A worker's life: generation after generation, until the last step is committed.

In each generation all live processes meet, build groups, settle what was committed, move the state to its new
places and train on. A lost peer, or the launcher's word that the generation is over, ends it; the process
stays. The states of a life:

    waiting -> meeting -> settling -> training -> finished
       ^----------- generation over -----'
"""

import json
import logging
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ntp.balance import Balance
from ntp.checkpoint.session import Checkpoints
from ntp.collectives import Group, MembershipChangedError, Mesh, PeerLostError, TorchFabric, build_mesh
from ntp.config import Config
from ntp.control import Control
from ntp.data import Datasets
from ntp.device_proof import DeviceProof, compare
from ntp.errors import NtpError
from ntp.meter import Meter
from ntp.plan import Plan, make_plan
from ntp.protocol import (
    FINISHED,
    REFUSED,
    STARTED,
    Generation,
    Phase,
    RecoveryTimes,
    metrics_key,
    recovery_key,
    snapshot_directory,
)
from ntp.recovery import StateLostError, agree, carry
from ntp.run_directory import metrics_line, summary
from ntp.traces import traced
from ntp.trainer import StepResult, Trainer, Watch

_STANDBY_POLL_S = 0.1
_log = logging.getLogger(__name__)


JoinGeneration = Callable[[Plan], AbstractContextManager[TorchFabric]]
"""Builds the groups of a generation, and gives them up on exit (`ntp.process_groups`)."""


class UnrecoverableLossError(RuntimeError):
    """State was lost that neither a live rank nor a checkpoint has."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a life is spent on.

    Attributes:
        resume, strict: where the first generation takes its state from (`ntp.checkpoint`).
        say: takes a line for the user; called by the reporter alone.
        watch: told of every phase; passes it on to the control store.
        proof: what the device computes, compared with all others' in every generation.
    """

    config: Config
    rank: int
    run_dir: Path
    resume: str | None
    strict: bool
    device: torch.device
    datasets: Datasets
    say: Callable[[str], None]
    watch: Watch
    proof: DeviceProof | None = None


class Life:
    """One worker process."""

    def __init__(self, job: Job, control: Control, join: JoinGeneration):
        self._meter = Meter(job.watch, job.device)
        self._job, self._control, self._join = replace(job, watch=self._meter), control, join
        self._started = time.monotonic()
        self._trainers: list[Trainer] = []
        self._has_worked = False
        self._left = 0.0

    def run(self) -> None:
        """Live until the job is finished.

        Raises:
            FencedError: the job goes on without this process.
            PeerLostError: a peer has gone and nobody has opened a new generation.
            UnrecoverableLossError: see there.
        """
        lost: RuntimeError | None = None
        while True:
            self._job.watch.enter(Phase.WAITING, self._step())
            generation = self._next_generation(lost)
            if generation is None:
                return
            try:
                self._live(generation)
                return
            except (PeerLostError, MembershipChangedError) as error:
                # Its frames hold process groups; while those live, peers wait for this process.
                lost = type(error)(str(error))
                rank, reason = self._job.rank, _in_short(error)
                _log.warning("rank %d left generation %d: %s", rank, generation.generation, reason)
                _log.debug("%s", error)
            self._left = time.time()

    def _next_generation(self, lost: RuntimeError | None) -> Generation | None:
        patience = None if lost is None else self._job.config.elastic.patience_s
        try:
            generation = self._control.next_generation(self._has_worked, patience)
        except TimeoutError:
            assert lost is not None
            raise lost from None
        self._has_worked = True
        return generation

    def _step(self) -> int:
        return max((trainer.committed for trainer in self._trainers), default=0)

    def _live(self, generation: Generation) -> None:
        plan = make_plan(self._job.config, generation.failed, generation.generation)
        if not self._control.arrive(len(plan.world)):
            return
        met = time.time()
        with self._join(plan) as fabric:
            world = fabric.group(plan.world, on_host=True)
            assert world is not None
            mesh = build_mesh(plan, self._job.rank, fabric)
            compare(world, self._job.proof)
            carrier = _carrier(plan, self._job.device, world, mesh, fabric)
            built = time.time()
            era = _Era(self._job, self._control, self._meter, plan, world, mesh, self._started)
            source, moved = era.settle(self._trainers, carrier)
            if generation.generation > 0:
                era.time_recovery(generation, self._left or met, built, source, moved)
            era.train()


class _Notes:
    """Lines that the user has been told, kept for the launcher until its next message.

    It knows no `_Era`, which would otherwise keep itself, and with it the state of an old layout, alive.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._kept: list[str] = []

    def add(self, line: str) -> None:
        self._say(line)
        self._kept.append(line)

    def take(self) -> list[str]:
        kept, self._kept = self._kept, []
        return kept


class _Era:
    """One worker's part in one generation."""

    def __init__(
        self,
        job: Job,
        control: Control,
        meter: Meter,
        plan: Plan,
        world: Group,
        mesh: Mesh | None,
        started: float,
    ):
        self._job, self._control, self._plan, self._world, self._mesh = job, control, plan, world, mesh
        self._meter, self._started = meter, started
        self._notes = _Notes(job.say)
        self._reports = job.rank == plan.reporter
        self._trainer: Trainer | None = None
        self._recovery: RecoveryTimes | None = None
        self._balance: Balance | None = None  # that the user has been told of
        self._settled = 0.0
        self._replayed = 0
        self._checkpoints = mesh and Checkpoints(
            job.config,
            job.run_dir,
            snapshot_directory(job.run_dir),
            mesh,
            say=self._notes.add if self._reports else lambda line: None,
        )

    def settle(self, kept: list[Trainer], carrier: Group) -> tuple[str, int]:
        """Bring the state to its places under this plan.

        Args:
            kept: the layouts that this process has; brought up to date, also where a loss ends this.
            carrier: see `ntp.recovery.carry`.

        Returns:
            Where lost state came from, and the bytes that were received from other ranks.
        """
        self._job.watch.enter(Phase.MOVING, max((trainer.committed for trainer in kept), default=0))
        job, source, moved = self._job, "peers", 0
        try:
            decision = agree(job.config, self._world, kept)
            if decision.layout is None:
                self._begin(kept, job.resume, job.strict)
            else:
                moved = carry(job.config, self._plan, self._world, carrier, decision, kept, self._make)
                for trainer in kept:
                    trainer.publish()
        except StateLostError as lost:
            source = self._go_back(kept, lost)
        self._trainer = kept[0] if kept else None
        self._settled = time.time()
        if self._trainer is not None and self._trainer.result is not None:
            self._follow_up(self._trainer, self._trainer.result)
        return source, moved

    def _go_back(self, kept: list[Trainer], lost: StateLostError) -> str:
        """Take everyone back to the newest saved state, or to the start where none has been saved yet.

        Returns:
            Where the state came from.
        """
        job, source = self._job, "start"
        for layout in kept:
            layout.retire()
        trainer = self._make() if lost.step > 0 else None
        if trainer is not None:
            assert self._checkpoints is not None
            trainer.committed, source = self._checkpoints.go_back(trainer)
            if source == "start" and not (job.config.checkpoint.every or job.config.elastic.snapshot_every):
                raise UnrecoverableLossError(f"{lost}; nothing is saved that the job could go back to")
        if source == "start":
            if trainer is not None:
                trainer.retire()
                trainer = None
            self._begin(kept, job.resume, job.strict)
        elif trainer is not None:
            trainer.publish()
            kept[:] = [trainer]
        if kept:
            self._replayed = lost.step - kept[0].committed
        return source

    def _begin(self, kept: list[Trainer], resume: str | None, strict: bool) -> None:
        trainer = self._make(initialise=True)
        if trainer is not None:
            assert self._checkpoints is not None
            try:
                trainer.committed = self._checkpoints.start(trainer, resume, strict)
            except NtpError as error:
                if not self._control.has(STARTED):
                    self._control.put(REFUSED, str(error))
                raise
            if self._reports:
                self._control.put(STARTED, str(trainer.committed))
        kept[:] = [] if trainer is None else [trainer]

    def _make(self, initialise: bool = False) -> Trainer | None:
        job = self._job
        if self._mesh is None:
            return None
        return Trainer(job.config, self._plan, self._mesh, job.datasets, job.device, job.watch, initialise)

    def time_recovery(
        self, generation: Generation, left: float, built: float, source: str, moved: int
    ) -> None:
        """Note what the change of membership took; told with the first committed step."""
        self._recovery = RecoveryTimes(
            generation=generation.generation,
            unblock=max(0.0, left - generation.detected_at),
            rebuild=built - max(left, generation.detected_at),
            move=self._settled - built,
            replay=0.0,
            bytes_moved=moved,
            steps_replayed=self._replayed,
            source=source,
        )

    def train(self) -> None:
        """Train until the job finished. Raises MembershipChangedError where the generation is over before."""
        if self._trainer is None:
            self._stand_by()
            return
        assert self._checkpoints is not None
        trainer, last = self._trainer, self._job.config.train.last_step
        if trainer.committed == last == 0:
            self._checkpoints.after(trainer, 0)
        while trainer.committed < last:
            before = time.monotonic()
            step = trainer.committed + 1
            with self._tracing(step):
                result = trainer.step(step, self._checkpoints.before_commit)
            self._after_step(trainer, result, before)
            if trainer.switch:
                raise MembershipChangedError("a newer generation begins after this step")
        self._finish(trainer)

    def _after_step(self, trainer: Trainer, result: StepResult, before: float) -> None:
        seconds = time.monotonic() - before
        if self._reports and self._recovery is not None:
            times = replace(self._recovery, replay=time.time() - self._settled)
            self._control.put(recovery_key(self._plan.generation), times.to_json())
            self._recovery = None
        self._tell(trainer, result, seconds)
        assert self._checkpoints is not None
        self._checkpoints.after(trainer, result.step)

    def _follow_up(self, trainer: Trainer, result: StepResult) -> None:
        """Do again what follows a step: whoever did it may have gone in the middle."""
        self._tell(trainer, result, seconds=None)
        assert self._checkpoints is not None
        self._checkpoints.make_up(trainer)

    def _tell(self, trainer: Trainer, result: StepResult, seconds: float | None) -> None:
        every = self._job.config.train.eval_every
        held_out = trainer.evaluate() if every and result.step % every == 0 else None
        if self._reports:
            self._post_metrics(result, seconds, held_out, trainer.balance)
        self._job.watch.enter(Phase.CHECKPOINT, result.step)

    def _post_metrics(
        self, result: StepResult, seconds: float | None, held_out: float | None, balance: Balance | None
    ) -> None:
        line = metrics_line(result, seconds, self._plan.generation)
        if held_out is not None:
            line["held_out_loss"] = held_out
        if balance is not self._balance and balance is not None:
            self._balance, line["balance"] = balance, balance.to_json()
            self._notes.add(str(balance))
        line |= self._meter.read()
        notes = self._notes.take()
        if notes:
            line["notes"] = notes
        self._control.put(metrics_key(result.step), json.dumps(line))

    def _tracing(self, step: int) -> AbstractContextManager[None]:
        job = self._job
        if step not in job.config.train.profile:
            return nullcontext()
        return traced(job.run_dir, step, job.rank, job.device)

    def _stand_by(self) -> None:
        self._job.watch.enter(Phase.WAITING, 0)
        while not self._control.has(FINISHED):
            self._control.check()
            if self._control.wants_switch():
                raise MembershipChangedError("a newer generation is open")
            time.sleep(_STANDBY_POLL_S)

    def _finish(self, trainer: Trainer) -> None:
        assert self._checkpoints is not None
        self._job.watch.enter(Phase.FINISHING, trainer.committed)
        hashes, usage = trainer.hashes(), trainer.usage()
        self._checkpoints.end(trainer)
        if self._reports:
            wall_s = time.monotonic() - self._started
            values = summary(self._plan, trainer.committed, trainer.result, hashes, usage, wall_s)
            values |= {"checkpoints": self._checkpoints.figures.to_json(), "notes": self._notes.take()}
            if trainer.balance is not None:
                values["balance"] = trainer.balance.to_json()
            self._control.put(FINISHED, json.dumps(values))
        while not self._control.has(FINISHED):
            self._control.check()
            time.sleep(_STANDBY_POLL_S / 10)


def _carrier(plan: Plan, device: torch.device, world: Group, mesh: Mesh | None, fabric: TorchFabric) -> Group:
    """The group in which state moves: every process, with tensors of the device."""
    if device.type == "cpu":
        return world
    if mesh is not None and set(plan.workers) == set(plan.world):
        return mesh.workers
    carrier = fabric.group(plan.world)
    assert carrier is not None
    return carrier


def _in_short(error: RuntimeError) -> str:
    """The first sentence, without the place in the transport's source and its advice to look for bugs."""
    text = re.sub(r"^\[[^\]]*\] *", "", " ".join(str(error).split()))
    return text.partition(". ")[0]
