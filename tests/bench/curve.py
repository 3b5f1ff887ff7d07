"""Loss curves on real text: does the trainer learn as the stock model does?

    torchrun --nproc-per-node 1 -m tests.bench.curve configs/tiny-1xh100.yaml --set train.steps=500

Both train on the same sequences, one document each and one microbatch a step, with the same schedule, from
three seeds each. Prints the mean loss of every tenth of the steps, and how far ours leaves stock's range.
"""

import argparse
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta
from statistics import fmean

import torch
import torch.distributed as dist

from ntp.collectives import TorchFabric, build_mesh
from ntp.config import Config, load_config
from ntp.data import Batch, Dataset, Datasets, datasets_of
from ntp.learning_rate import learning_rate
from ntp.plan import make_plan
from ntp.trainer import Trainer
from tests.bench.sequences import whole_sequences
from tests.bench.stock import StockModel, StockOptimizer

_SEEDS = (0, 1, 2)
_PARTS = 10


class _WholeSequences(Dataset):
    """The same tokens, without borders of documents."""

    def __init__(self, dataset: Dataset, seq_len: int):
        self._dataset, self._seq_len = dataset, seq_len

    def batch(self, numbers: Iterable[int]) -> Batch:
        batch = self._dataset.batch(numbers)
        return whole_sequences(batch.inputs, batch.targets, self._seq_len)


def main() -> None:
    """Run on one GPU."""
    options = argparse.ArgumentParser()
    options.add_argument("config")
    options.add_argument("--set", nargs="*", default=[])
    given = options.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    configs = [load_config(given.config, [*given.set, f"train.seed={seed}"]) for seed in _SEEDS]
    data = _WholeSequences(datasets_of(configs[0]).train, configs[0].train.seq_len)
    stock = [_told("stock", list(_stock(config, data, device))) for config in configs]
    _print(stock, [_told("ours", list(_ours(config, data, device))) for config in configs])
    dist.destroy_process_group()


def _stock(config: Config, data: Dataset, device: torch.device) -> Iterator[float]:
    train = config.train
    assert train.micro_batch == train.global_batch, "stock accumulates nothing: a microbatch a step"
    torch.manual_seed(train.seed)
    group = dist.new_group([0])
    assert isinstance(group, dist.ProcessGroup)
    model = StockModel(config.model, group, train.seq_len, device)
    optimizer = StockOptimizer(model, group)
    for step in range(1, train.steps + 1):
        first = (step - 1) * train.global_batch
        batch = data.batch(range(first, first + train.global_batch)).to(device)
        loss = model(batch.inputs, batch.targets) / batch.target_tokens
        loss.backward()
        optimizer.step(learning_rate(config.optimizer, step, train.steps))
        yield loss.item()


def _ours(config: Config, data: Dataset, device: torch.device) -> Iterator[float]:
    plan, limit = make_plan(config), timedelta(seconds=60)
    mesh = build_mesh(plan, 0, TorchFabric(plan.world, 0, lambda: None, limit, limit, device))
    assert mesh is not None
    trainer = Trainer(config, plan, mesh, Datasets(data, None, None), device)  # type: ignore[arg-type]
    for step in range(1, config.train.steps + 1):
        yield trainer.step(step).loss


def _print(stock: list[list[float]], ours: list[list[float]]) -> None:
    length = len(stock[0]) // _PARTS
    worst = 0.0
    for part in range(_PARTS):
        some = slice(part * length, (part + 1) * length)
        theirs, mine = ([fmean(losses[some]) for losses in runs] for runs in (stock, ours))
        outside = max(0.0, max(mine) - max(theirs), min(theirs) - min(mine))
        worst = max(worst, outside)
        print(
            f"steps {some.start + 1:4d}-{some.stop:4d} stock {_listed(theirs)} ours {_listed(mine)} "
            f"outside {outside:.4f}"
        )
    print(f"furthest outside: {worst:.4f}")


def _told(name: str, losses: list[float]) -> list[float]:
    """These losses, once the last of them has been printed: a curve takes a while."""
    print(f"{name}: {losses[-1]:.4f} after {len(losses)} steps", flush=True)
    return losses


def _listed(losses: list[float]) -> str:
    return " ".join(f"{loss:.4f}" for loss in losses)


if __name__ == "__main__":
    main()
