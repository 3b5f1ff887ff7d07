"""Train the `transformers` model of a configuration with plain torch AdamW: an independent second opinion.

    python -m tests.transformers_training configs/tiny-cpu.yaml

Same initial weights, same batches, same schedule; nothing of the trainer's arithmetic. One process, no mesh.
"""

import math
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from ntp.config import Config, load_config
from ntp.data import Batch, Datasets, datasets_of
from ntp.initial import initial_units
from ntp.parameters import parameter_specs
from ntp.units import UnitRange
from tests.transformers_oracle import build_oracle, logical_tensors


def train_losses(config: Config, datasets: Datasets) -> Iterator[float]:
    """Yield the mean loss of every step's global batch, before its update."""
    model = build_oracle(config.model)
    load_initial_weights(model, config)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=settings.betas,
        eps=settings.eps,
    )
    for step in range(config.train.steps):
        batches = [
            datasets.train.batch([step * config.train.global_batch + index])
            for index in range(config.train.global_batch)
        ]
        tokens = sum(batch.target_tokens for batch in batches)
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            loss = loss_sum(model, batch) / tokens
            loss.backward()
            total += loss.item()
        if settings.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate(config, step)
        optimizer.step()
        yield total


def load_initial_weights(model: torch.nn.Module, config: Config) -> None:
    """Give the oracle the weights that the trainer starts from."""
    tensors: dict[str, Tensor] = {}
    for spec in parameter_specs(config.model):
        every = UnitRange(0, spec.units)
        units = initial_units(spec, every, config.train.seed, config.model.initializer_range)
        tensors |= logical_tensors(spec, units.view(spec.units, *spec.unit_shape))
    model.load_state_dict(tensors, strict=not config.model.tie_word_embeddings)


def loss_sum(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Sum of token losses of one packed sequence; attention stays inside each document."""
    documents, place = batch.documents, torch.arange(len(batch.documents))
    visible = (documents[:, None] == documents[None, :]) & (place[:, None] >= place[None, :])
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    logits = model(
        input_ids=batch.inputs[None],
        attention_mask=mask[None, None],
        position_ids=batch.positions[None].long(),
    ).logits[0]
    return torch.nn.functional.cross_entropy(logits, batch.targets, ignore_index=-100, reduction="sum")


def rate(config: Config, step: int) -> float:
    """Linear warm-up, then a cosine to `min_lr_ratio` of the peak; `step` counts from 0."""
    settings, schedule = config.optimizer, config.optimizer.schedule
    assert schedule.kind == "cosine"
    done = step + 1
    if done <= schedule.warmup_steps:
        return settings.lr * done / schedule.warmup_steps
    part = (done - schedule.warmup_steps) / (config.train.steps - schedule.warmup_steps)
    floor = schedule.min_lr_ratio
    return settings.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * part)))


def main() -> None:
    config = load_config(sys.argv[1], sys.argv[2:])
    for step, loss in enumerate(train_losses(config, datasets_of(config)), start=1):
        print(step, f"{loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
