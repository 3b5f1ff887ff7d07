"""From one generation to the next: settle what was committed, then move the state to its new places.

Every live process takes part, with or without state. They tell each other what they have, and all come to the
same decision from it (`decide`, pure):

1. *Layout.* State is laid out by the plan of some generation. A move fills the new layout beside the old one,
   which is dropped only after everyone's move is complete; a loss in between may therefore leave both. The
   newest layout that all its surviving workers have is the one to go on from.
2. *Step.* If any worker has made the update of step s, every worker had voted on it and has its gradients,
   so the others make it too. Else nobody makes it and the step is computed again.
3. *Moves.* `state_moves` from that layout to the new plan. What nobody keeps any more raises
   `StateLostError`; the caller then goes back to a snapshot or a checkpoint.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ntp.collectives import Group
from ntp.config import Config
from ntp.messages import gather_values
from ntp.parameters import ParameterSpec, parameter_specs
from ntp.plan import Plan, make_plan
from ntp.reshard import Rectangle, post
from ntp.state_moves import StateMoves, state_moves
from ntp.trainer import StepResult, Trainer

_STATE_BYTES = 12
"""Of an element: its master and two moments, in float32."""
_ROUND_ELEMENTS = 1 << 26
"""Of the whole model, whose state travels at once: the room that a move takes beside the two layouts."""


class StateLostError(RuntimeError):
    """Some state survives on no live rank; `step` was the last to be committed."""

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


@dataclass(frozen=True, slots=True)
class Decision:
    """What to go on from, the same on every process.

    Attributes:
        layout: generation of the layout, None where nobody has state: the job begins.
        failed: the ranks that were missing in that generation.
        alive: the ranks that have their state in it.
        step: the last step that is, or is to be, committed.
        result: that step's result; None where no step has been committed since the start or a load.
    """

    layout: int | None
    failed: tuple[int, ...]
    alive: tuple[int, ...]
    step: int
    result: StepResult | None


def report(trainers: Iterable[Trainer]) -> list[dict[str, Any]]:
    """What a process has: for each layout its generation, missing ranks, step and result, as JSON values."""
    return [
        {
            "layout": trainer.plan.generation,
            "failed": list(trainer.plan.failed),
            "step": trainer.committed,
            "result": None if trainer.result is None else asdict(trainer.result),
        }
        for trainer in trainers
    ]


def decide(config: Config, reports: Mapping[int, Sequence[Mapping[str, Any]]]) -> Decision:
    """Decide from the reports of all live processes, by rank.

    Raises:
        StateLostError: no layout is whole on its surviving workers.
    """
    failed_of = {entry["layout"]: entry["failed"] for entries in reports.values() for entry in entries}
    if not failed_of:
        return Decision(None, (), (), 0, None)
    for layout in sorted(failed_of, reverse=True):
        has = {r: e for r, entries in reports.items() for e in entries if e["layout"] == layout}
        workers = set(make_plan(config, failed_of[layout], layout).workers)
        if any(rank in workers and entries and rank not in has for rank, entries in reports.items()):
            continue
        newest = max(has.values(), key=lambda entry: entry["step"])
        result = None if newest["result"] is None else StepResult(**newest["result"])
        return Decision(layout, tuple(failed_of[layout]), tuple(sorted(has)), newest["step"], result)
    step = max(entry["step"] for entries in reports.values() for entry in entries)
    raise StateLostError(f"layouts {sorted(failed_of)} are all incomplete", step)


def agree(config: Config, world: Group, trainers: Iterable[Trainer]) -> Decision:
    """Tell the others what this process has and decide; collective over `world`.

    Args:
        world: every live process of the new generation; carries host tensors.
        trainers: the layouts that this process has.

    Raises:
        StateLostError: on every process alike.
    """
    return decide(config, dict(zip(world.ranks, gather_values(world, report(trainers)), strict=True)))


def carry(
    config: Config,
    plan: Plan,
    world: Group,
    carrier: Group,
    decision: Decision,
    kept: list[Trainer],
    make_trainer: Callable[[], Trainer | None],
) -> int:
    """Finish the step and carry the state into `plan`; collective over `world`.

    Args:
        world: every live process of the new generation; carries host tensors.
        carrier: the same processes; carries tensors of the device that has the state.
        kept: the layouts that this process has. In the end it holds the new one alone (nothing on a
            standby); a loss on the way leaves in it what the next generation can go on from. Of the old one
            only the state is kept meanwhile, so that both have room.
        make_trainer: makes this process's trainer under `plan`, without state; None for a standby.

    Returns:
        The bytes of state that went from one rank to another, of all ranks.

    Raises:
        StateLostError: on every process alike.
    """
    assert decision.layout is not None
    kept[:] = [trainer for trainer in kept if trainer.plan.generation == decision.layout]
    mine = kept[0] if kept else None
    if mine is not None and mine.committed < decision.step:
        assert decision.result is not None
        mine.finish(decision.result.grad_norm)
    specs = parameter_specs(config.model)
    old = make_plan(config, decision.failed, decision.layout)
    rank = world.ranks[world.rank]
    moves = state_moves(old, plan, decision.alive, rank, specs)
    if moves.missing:
        names = ", ".join(moves.missing[:3])
        raise StateLostError(f"no live rank has the state of {names} any more", decision.step)
    if mine is not None:
        mine.retire()
    trainer = make_trainer()
    _move(carrier, moves, specs, mine, trainer)
    if trainer is not None:
        trainer.committed, trainer.result = decision.step, decision.result
        kept.append(trainer)
    gather_values(world, None)  # everyone's move is complete: old layouts may go
    kept[:] = [] if trainer is None else [trainer]
    return _STATE_BYTES * moves.travelling


def _move(
    carrier: Group,
    moves: StateMoves,
    specs: Sequence[ParameterSpec],
    source: Trainer | None,
    target: Trainer | None,
) -> None:
    """Carry masters and moments, some parameters at a time."""
    like = torch.empty(0, device=carrier.device)
    for first, stop in _rounds(specs):
        outgoing: list[tuple[int, Tensor]] = []
        for part in _of_round(moves.sends, first, stop):
            assert source is not None
            outgoing.append((part.peer, torch.stack(source.optimizer.state(part))))
        receives = _of_round(moves.receives, first, stop)
        pieces = post(carrier, outgoing, [(part.peer, 3 * part.elements) for part in receives], like).wait()
        for part, piece in zip(receives, pieces, strict=True):
            assert target is not None
            for state, values in zip(
                target.optimizer.state(part), piece.view(3, len(part.units), -1), strict=True
            ):
                state.copy_(values)
    carrier.synchronize()


def _rounds(specs: Sequence[ParameterSpec]) -> Iterator[tuple[int, int]]:
    """Indices of parameters that travel together; the same on every rank."""
    first, elements = 0, 0
    for spec in specs:
        elements += spec.units * spec.unit_elements
        if elements >= _ROUND_ELEMENTS or spec is specs[-1]:
            yield first, spec.index + 1
            first, elements = spec.index + 1, 0


def _of_round(parts: Sequence[Rectangle], first: int, stop: int) -> list[Rectangle]:
    return [part for part in parts if first <= part.spec.index < stop]
