"""What it costs to watch a run of 100 steps a second: processor time, with everybody that can listen.

Each figure is the least of many short rounds, in seconds of the core that the figures in `launcher/README.md`
are from: one that is slower, or shares its units with another, is slower at `known_work` too.
"""

import io
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from ntp_launcher.audience import Audience
from ntp_launcher.exporters import TensorBoard
from ntp_launcher.prometheus import Prometheus
from ntp_launcher.terminals import View
from rich.console import Console
from torch.distributed import HashStore

from ntp.meter import Meter
from ntp.protocol import Generation, Phase, metrics_key
from ntp.run_directory import Metrics, metrics_line
from ntp.trainer import StepResult
from tests.test_progress_view import config, line

STEP_S = 0.01
STEPS = 50  # of a round, with one look: two looks a second
MOST = 0.005  # of the time
KNOWN_S = 1.14e-3  # of `known_work` on that core, where the reporter's line took 31 us
ROUNDS = 200


def known_work() -> None:
    """What reporting is made of: calls, dictionaries, rounding, JSON."""
    for step in range(STEPS):
        json.loads(json.dumps({name: round(step / 7, place) for place, name in enumerate(line(step))}))


def seconds_of(once: Callable[[], None]) -> float:
    """Processor seconds, all threads of this process together."""
    before = time.process_time()
    once()
    return time.process_time() - before


def least(once: Callable[[], None]) -> float:
    """Seconds of a round on the core of the figures. Known work and `once` take turns."""
    times = [(seconds_of(known_work), seconds_of(once)) for _ in range(ROUNDS)]
    known, least_of_once = (min(of) for of in zip(*times, strict=True))
    return least_of_once * KNOWN_S / known


def test_the_launcher_spends_under_half_a_percent_of_a_processor(tmp_path: Path) -> None:
    of = config("train.global_batch=64")
    board, endpoint = TensorBoard(of, tmp_path / "tensorboard"), Prometheus("127.0.0.1", 0)
    view = View(Console(file=io.StringIO(), force_terminal=True, width=200, height=50))
    ears = (board, endpoint, view)
    audience, metrics = Audience(of, tmp_path, ears), Metrics(tmp_path)
    audience.begin(Generation(0, []))
    texts = [json.dumps(line(step)) for step in range(1, STEPS + 1)]

    def steps() -> None:
        for text in texts:
            metrics.append(text)
            audience.committed(json.loads(text))

    def steps_and_look() -> None:
        steps()
        for ear in ears:
            ear.look(audience.snapshot)
        board._writer.flush()  # the work of its thread belongs to this round

    try:
        for_a_step, all_of_it = least(steps) / STEPS, least(steps_and_look) / STEPS
    finally:
        audience.close()
        metrics.close()
    assert for_a_step < MOST * STEP_S
    assert all_of_it < MOST * STEP_S


class Watch:
    """Watches nothing: heartbeats are not for people."""

    def enter(self, phase: Phase, step: int) -> None:
        """See `ntp.trainer.Watch`."""

    def microbatch(self, step: int, gradients: torch.Tensor) -> None:
        """See `ntp.trainer.Watch`."""

    def wants_switch(self) -> bool:
        """See `ntp.trainer.Watch`."""
        return False


def test_the_reporter_spends_under_half_a_percent_of_a_step() -> None:
    store, meter = HashStore(), Meter(Watch(), torch.device("cpu"))

    def steps() -> None:
        for step in range(STEPS):
            for phase in (Phase.STEP, Phase.EXCHANGE, Phase.VOTE, Phase.UPDATE):
                meter.enter(phase, step)
            values = metrics_line(StepResult(step, 2.5, 1.0, 1e-3, 2048), STEP_S, 0) | meter.read()
            store.set(metrics_key(step), json.dumps(values))

    assert least(steps) / STEPS < MOST * STEP_S
