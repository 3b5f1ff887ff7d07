"""Learning-rate schedules: pure functions of the step."""

import math

from ntp.config import OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of step `step` (1 to `steps`).

    Linear warm-up over `warmup_steps`; then `constant`, a `cosine` to `min_lr_ratio` at the last step, or
    `wsd` (warm-up, stable, decay: linear down to `min_lr_ratio` over the last `decay_steps`).
    """
    schedule = optimizer.schedule
    if step <= schedule.warmup_steps:
        return optimizer.lr * step / schedule.warmup_steps
    if schedule.kind == "cosine":
        left = 1 - (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
        shape = 0.5 * (1 - math.cos(math.pi * left))
    elif schedule.kind == "wsd":
        shape = min(1.0, (steps - step) / max(1, schedule.decay_steps))
    else:
        shape = 1.0
    return optimizer.lr * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * shape)
