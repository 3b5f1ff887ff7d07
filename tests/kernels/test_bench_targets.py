"""Which rows of a bench run a target looks at, and when it is reached."""

from ntp_kernels.bench.rows import Row
from ntp_kernels.bench.targets import verdicts


def row(section: str, ours: float, base: float, kernel: str = "x", shape: str = "8192x4096x2048") -> Row:
    return Row(section, kernel, shape, ours, base, "baseline", 1e12, "flop")


def test_a_run_without_rows_answers_nothing() -> None:
    assert verdicts([]) == []


def test_forward_and_weight_gradient_are_held_to_one_mean_and_one_least() -> None:
    mean, least = verdicts([row("linear", 100, 110), row("wgrad", 100, 89)])
    assert mean.count == least.count == 2
    assert mean.reached
    assert not least.reached
    assert least.value == 0.89


def test_the_contraction_and_its_segments_choose_the_target() -> None:
    one, more = "cut, row scales, one segment", "cut, row scales, more segments"
    found = verdicts(
        [
            row(one, 100, 96),
            row(one, 100, 81, shape="8192x8192x1024"),
            row(one, 100, 10, shape="8192x4096x512"),
            row(more, 100, 86, shape="8192x4096x14336"),
            row("cut, product alone, one segment", 100, 10),
        ]
    )
    assert [(verdict.value, verdict.reached) for verdict in found] == [
        (0.96, False),
        (0.96, True),
        (0.81, True),
        (0.86, True),
    ]


def test_cross_entropy_may_take_longer_than_reading_its_logits() -> None:
    share, entropy = verdicts([row("pointwise", 100, 84), row("pointwise", 120, 100, "cross entropy, all")])
    assert not share.reached
    assert entropy.reached
    assert entropy.value == 1.2
