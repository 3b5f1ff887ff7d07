"""Compare the trainer with the stock model on the GPUs of one host.

    torchrun --nproc-per-node 4 -m tests.bench configs/8b-4xh100.yaml --part backward
    torchrun --nproc-per-node 4 -m tests.bench configs/1b-4xh100.yaml --part step

`backward` is forward and backward of one microbatch, `step` a whole step with gradient exchange and AdamW.
Stock is measured before and after ours; prints milliseconds (median), tokens per second and GPU, MFU, the
ratio, and the peak of memory.
"""

import argparse
import gc
import os
import statistics
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ntp.collectives import TorchFabric, build_mesh
from ntp.config import Config, load_config
from ntp.data import Batch, Dataset, Datasets
from ntp.ddp import DistributedDataParallel
from ntp.layers import refresh_scales
from ntp.model import Model
from ntp.parameters import parameter_specs
from ntp.peer_memory import allocated_bytes
from ntp.plan import make_plan
from ntp.trainer import Trainer, make_weights
from tests.bench.sequences import whole_sequences
from tests.bench.stock import StockModel, StockOptimizer

_PEAK = 989e12  # dense bf16 of an H100
_RUNS = 12


class _OneDocument(Dataset):
    """Random tokens, one document a sequence: attention sees all of it."""

    def __init__(self, config: Config):
        self._config = config

    def batch(self, numbers: Iterable[int]) -> Batch:
        numbers, length = list(numbers), self._config.train.seq_len
        generator = torch.Generator().manual_seed(numbers[0])
        tokens = torch.randint(self._config.model.vocab_size, (len(numbers), length + 1), generator=generator)
        return whole_sequences(tokens[:, :-1].reshape(-1), tokens[:, 1:].reshape(-1), length)


def main() -> None:
    """Run on every rank."""
    options = argparse.ArgumentParser()
    options.add_argument("config")
    options.add_argument("--part", choices=["backward", "step"], default="backward")
    options.add_argument("--set", nargs="*", default=[])
    options.add_argument("--alone", action="store_true", help="without stock, which cannot cut 8 heads in 3")
    options.add_argument("--profile", default="", help="write a table of kernels by time here")
    given = options.parse_args()
    config = load_config(given.config, given.set)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=120), device_id=device)
    bench = _Bench(config, device, given.part)
    lines = [] if given.alone else [("stock", *bench.stock())]
    lines.append(("ours", *bench.ours(given.profile)))
    if not given.alone:
        lines.append(("stock again", *bench.stock()))
    if dist.get_rank() == 0:
        _print(config, given.part, lines)
    dist.destroy_process_group()


def _print(config: Config, part: str, lines: list[tuple[str, float, float]]) -> None:
    train = config.train
    tokens = train.seq_len * (train.global_batch if part == "step" else train.micro_batch)
    gpus = dist.get_world_size()
    print(f"{torch.cuda.get_device_name()} x{gpus}, {part}, {tokens} tokens")
    for name, milliseconds, memory in lines:
        speed = tokens / milliseconds * 1e3 / gpus
        mfu = speed * _flops_per_token(config) / _PEAK
        ratio = lines[0][1] / milliseconds
        print(f"{name:12s} {milliseconds:8.2f} ms {speed:8.0f} tok/s/GPU MFU {mfu:.3f} "
              f"x{ratio:.3f} {memory:.1f} GiB", flush=True)  # fmt: skip


def _flops_per_token(config: Config) -> float:
    model = config.model
    parameters = sum(s.units * s.unit_elements for s in parameter_specs(config.model) if s.kind is not None)
    parameters -= model.vocab_size * model.hidden_size  # the embedding multiplies nothing
    attention = (
        2 * model.num_hidden_layers * model.num_attention_heads * model.head_dim * config.train.seq_len
    )
    return 6.0 * parameters + 3.0 * attention  # causal: half of each sequence


class _Bench:
    def __init__(self, config: Config, device: torch.device, part: str):
        self._config, self._device, self._part = config, device, part
        self._plan = make_plan(config)
        parallel = config.parallel
        rank, tp, dp = dist.get_rank(), parallel.tp, parallel.dp
        rows = [list(range(r * tp, (r + 1) * tp)) for r in range(dp)]
        columns = [[r * tp + c for r in range(dp)] for c in range(tp)]
        self._tensor = _own(rank, rows)
        self._replicas = _own(rank, columns)
        seconds = timedelta(seconds=120)
        fabric = TorchFabric(
            self._plan.world, rank, lambda: None, seconds, seconds, device, parallel.exchange == "peer"
        )
        self._mesh = build_mesh(self._plan, rank, fabric)
        self._data = _OneDocument(config)

    def stock(self) -> tuple[float, float]:
        train = self._config.train
        model = StockModel(self._config.model, self._tensor, train.seq_len, self._device)
        batch = self._data.batch(range(train.micro_batch)).to(self._device)
        if self._part == "backward":

            def run() -> None:
                model(batch.inputs, batch.targets).backward()
                for parameter in model.parameters():
                    parameter.grad = None

            return self._measure(run)
        optimizer = StockOptimizer(model, self._replicas)
        assert train.microbatches == self._config.parallel.dp, "stock accumulates nothing: a microbatch each"

        def step() -> None:
            model(batch.inputs, batch.targets).backward()
            optimizer.step(self._config.optimizer.lr)

        return self._measure(step)

    def ours(self, profile: str) -> tuple[float, float]:
        milliseconds, peak = self._ours(profile)
        return milliseconds, peak + allocated_bytes() / 2**30

    def _ours(self, profile: str) -> tuple[float, float]:
        config, mesh = self._config, self._mesh
        assert mesh is not None
        if self._part == "step":
            datasets = Datasets(self._data, None, None)  # type: ignore[arg-type]
            trainer = Trainer(config, self._plan, mesh, datasets, self._device)
            steps = iter(range(1, 10**6))
            return self._measure(lambda: trainer.step(next(steps)), profile)
        specs = parameter_specs(config.model)
        weights = make_weights(specs, self._plan, mesh.rank)
        ddp = DistributedDataParallel(specs, weights, self._plan, mesh, torch.bfloat16, self._device)
        ddp.buffer.parameters.normal_(0, 0.02)
        refresh_scales(weights.values(), mesh.tensor)
        model = Model(
            config.model,
            weights,
            mesh.tensor,
            config.train.seq_len,
            config.train.recompute,
            config.train.cuda_graphs,
        )
        batch = self._data.batch(range(config.train.micro_batch)).to(self._device)
        next(iter(ddp.microbatches()))

        def run() -> None:
            model.loss(batch).sum().backward()

        return self._measure(run, profile)

    def _measure(self, run: Callable[[], object], profile: str = "") -> tuple[float, float]:
        """Median milliseconds and peak GiB."""
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            run()
        times: list[float] = []
        for _ in range(_RUNS):
            torch.cuda.synchronize()
            dist.barrier()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        if profile:
            self._profile(run, profile)
        peak = torch.cuda.max_memory_allocated() / 2**30
        gc.collect()
        torch.cuda.empty_cache()
        return statistics.median(times), peak

    def _profile(self, run: Callable[[], object], path: str) -> None:
        with torch.profiler.profile() as profiler:
            run()
            torch.cuda.synchronize()
        if dist.get_rank() == 0:
            table = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=45)
            Path(path).write_text(table)
            profiler.export_chrome_trace(path + ".json")


def _own(rank: int, lists: list[list[int]]) -> dist.ProcessGroup:
    groups = [dist.new_group(ranks) for ranks in lists]
    return next(group for group, ranks in zip(groups, lists, strict=True) if rank in ranks)


if __name__ == "__main__":
    main()
