"""How long training stands still for a loss and for a return: the figures of `launcher/README.md`.

    pytest -m slow -s tests/test_recovery_time.py

Each run is a fresh one, so that every loss is a first one. Times are beyond that of the step itself.
"""

import statistics

import pytest

from tests.test_end_to_end import launch

RUNS = 9
LOSS_S, RETURN_S = 1.0, 1.0
FAULT = ("--set", "faults=[{kill: {rank: 3, step: 4}}]")


def stalls(lines, summary):
    """Seconds from the death to the next committed step, and of the change when the rank came back."""
    step = statistics.median(line["step_time_s"] for line in lines if line["step_time_s"])
    loss, join = summary["recoveries"]
    assert (loss["kind"], join["kind"]) == ("loss", "join")
    work = {change["kind"]: change["rebuild"] + change["move"] + change["replay"] for change in (loss, join)}
    noticed = loss["detect"] + loss["agree"] + loss["unblock"]
    return noticed + work["loss"] - step, work["join"] - step


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_median_loss_and_return_cost_less_than_a_second(tmp_path):
    told = [stalls(*launch(tmp_path / str(number), "tiny-cpu.yaml", *FAULT)) for number in range(RUNS)]
    losses, returns = (sorted(values) for values in zip(*told, strict=True))
    for name, values in (("loss", losses), ("return", returns)):
        median = statistics.median(values)
        print(f"{name}: median {median:.2f} s of {RUNS}, {values[0]:.2f} to {values[-1]:.2f}")
    assert statistics.median(losses) < LOSS_S
    assert statistics.median(returns) < RETURN_S
