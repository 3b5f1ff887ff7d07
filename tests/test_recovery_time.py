"""How long training stands still for a loss, a return and a hang: the figures of `launcher/README.md`.

    pytest -m slow -s tests/test_recovery_time.py

Each run is a fresh one, so that every loss is a first one. Times are beyond that of the step itself.
"""

import statistics

import pytest

from tests.test_end_to_end import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
LONGEST_S = 1.0
HANG_TIMEOUT_S = 5.0
KILL = ("faults=[{kill: {rank: 3, step: 3}}]",)
STOP = (
    "faults=[{stop: {rank: 3, step: 3}}]",
    "train.timeout_s=4.0",
    f"elastic.step_timeout_s={HANG_TIMEOUT_S}",
)


def stalls(run_dir, overrides):
    """Seconds from the fault to the next committed step, and of the change when the rank came back."""
    options = (word for override in ("train.steps=14", *overrides) for word in ("--set", override))
    lines, summary = launch(run_dir, "tiny-cpu.yaml", *options)
    step = statistics.median(line["step_time_s"] for line in lines if line["step_time_s"])
    loss, join = summary["recoveries"]
    assert (loss["kind"], join["kind"]) == ("loss", "join")
    lost, back = (change["rebuild"] + change["move"] + change["replay"] - step for change in (loss, join))
    return loss["detect"] + loss["agree"] + loss["unblock"] + lost, back


def median(name, values):
    middle = statistics.median(values)
    print(f"{name}: median {middle:.2f} s of {len(values)}, {min(values):.2f} to {max(values):.2f}")
    return middle


def test_the_median_loss_and_return_cost_less_than_a_second(tmp_path):
    losses, returns = zip(*(stalls(tmp_path / str(n), KILL) for n in range(9)), strict=True)
    assert median("loss", losses) < LONGEST_S
    assert median("return", returns) < LONGEST_S


def test_a_hang_costs_its_time_out_and_less_than_a_second(tmp_path):
    hangs, _ = zip(*(stalls(tmp_path / str(n), STOP) for n in range(3)), strict=True)
    assert median("hang", hangs) < HANG_TIMEOUT_S + LONGEST_S
