"""The memory estimate of a plan, against what a trainer really allocates, and what `--dry-run` says of it."""

import time
from pathlib import Path

import pytest
import torch
from ntp_launcher.cli import main
from ntp_launcher.flags import LaunchError
from ntp_launcher.memory_view import parse_memory, show_bytes

from ntp.config import Config, load_config
from ntp.data import datasets_of
from ntp.plan import make_plan
from ntp.planner.memory import RankMemory, estimate, smallest_degree
from ntp.testing import simulate
from ntp.trainer import Trainer

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "configs" / "tiny-cpu.yaml")
SHORT = ["train.seq_len=64", "train.steps=1", "model.num_hidden_layers=2"]


def by_rank(config: Config, failed: tuple[int, ...] = ()) -> dict[int, RankMemory]:
    return {rank.rank: rank for rank in estimate(config, make_plan(config, failed))}


@pytest.mark.parametrize("failed", [(), (3,)])
def test_what_a_rank_allocates_is_what_was_estimated(failed: tuple[int, ...]) -> None:
    config = load_config(TINY, SHORT)
    datasets = datasets_of(config)

    def body(member):
        trainer = Trainer(config, make_plan(config, failed), member.mesh, datasets, torch.device("cpu"))
        state = trainer.optimizer
        parameters = trainer.ddp.buffer.parameters.nbytes
        return parameters, state.master.nbytes + state.exp_avg.nbytes + state.exp_avg_sq.nbytes

    memory = by_rank(config, failed)
    for rank, (parameters, optimizer) in simulate(body, make_plan(config, failed)).items():
        expected = memory[rank]
        assert parameters == pytest.approx(expected.parameters, rel=0.05)  # every parameter is aligned
        assert optimizer == pytest.approx(expected.optimizer * 3 / 4, rel=0.15)  # norms have one carrier


def test_state_moves_before_gradients_take_room_and_after_they_have_given_it_up() -> None:
    config = load_config(TINY, SHORT)
    datasets = datasets_of(config)

    def body(member):
        trainer = Trainer(config, make_plan(config), member.mesh, datasets, torch.device("cpu"))
        held = [float_bytes(trainer)]
        trainer.publish()
        trainer.step(1)
        held.append(float_bytes(trainer))
        trainer.retire()
        return [*held, float_bytes(trainer)], 3 * trainer.optimizer.master.nbytes

    for (before, stepped, retired), state in simulate(body, make_plan(config)).values():
        assert before == retired == state
        assert stepped > state + state // 3  # gradients of its slices, and sums of groups


def float_bytes(trainer: Trainer) -> int:
    """Of float32 state and gradients, as far as optimizer and buffer hold them."""
    buffer = trainer.ddp.buffer
    flats = [*vars(trainer.optimizer).values(), *buffer._free, *buffer._stack]
    storages = {
        flat.untyped_storage().data_ptr(): flat.untyped_storage().nbytes()
        for flat in flats
        if isinstance(flat, torch.Tensor) and flat.dtype == torch.float32
    }
    return sum(storages.values())


def test_activations_are_those_that_autograd_saves() -> None:
    config = load_config(TINY, [*SHORT, "parallel.dp=1", "parallel.tp=1", "train.global_batch=1"])
    datasets = datasets_of(config)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def body(member):
        trainer = Trainer(config, make_plan(config), member.mesh, datasets, torch.device("cpu"))
        batch = trainer.batch(1, 0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return trainer.model.loss(batch)

    simulate(body, make_plan(config))
    saved = sum(kept.values())
    estimated = by_rank(config)[0].activations
    assert saved <= estimated <= 2 * saved  # the rest are temporaries of the backward pass


def test_copies_replicas_and_degree_move_the_numbers_as_they_should() -> None:
    twice, once = by_rank(load_config(TINY)), by_rank(load_config(TINY, ["optimizer.copies=1"]))
    assert sum(rank.optimizer for rank in twice.values()) == 2 * sum(rank.optimizer for rank in once.values())
    two = twice[0]
    smaller = by_rank(load_config(TINY), (3,))
    assert max(smaller[r].parameters for r in (0, 1, 2)) > two.parameters
    assert by_rank(load_config(TINY, ["train.device=cuda"]))[0].reserved > 0


def test_the_smallest_degree_that_fits_is_found() -> None:
    config = load_config(TINY)
    whole, halved = (max(r.total for r in estimate(config, make_plan(config, f))) for f in ((), (2, 3)))
    assert smallest_degree(config, halved) == 2
    assert smallest_degree(config, whole) == 4
    assert smallest_degree(config, whole - 1) is None


def test_a_dry_run_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([TINY, "--dry-run", "--device-memory", "80GiB"]) == 0
    assert "fits: rank" in capsys.readouterr().out
    assert main([TINY, "--dry-run", "--device-memory", "1MiB"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "does not fit: 8 of 8 ranks need more than 1.00 MiB" in said
    assert "train.grad_group" in said


def test_a_plan_of_512_gpus_takes_a_second_of_processor_time() -> None:
    changes = ["parallel.dp=64", "parallel.tp=8", "train.global_batch=512", "model.num_hidden_layers=32"]
    config = load_config(TINY, [*changes, "model.num_attention_heads=8", "model.num_key_value_heads=8"])
    before = time.process_time()
    memory = estimate(config, make_plan(config, (3, 70, 71, 511)))
    assert time.process_time() - before < 1
    assert len(memory) == 508


def test_a_dry_run_of_40000_ranks_takes_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    failed = ",".join(str(rank) for rank in range(0, 40_000, 8))
    before = time.process_time()
    changes = ["--set", "parallel.dp=10000", "--set", "parallel.standbys=5000"]
    assert main([TINY, "--dry-run", "--failed", failed, *changes]) == 0
    assert time.process_time() - before < 5
    assert "40000 processes, 40000 of them with a shard" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "expected"), [("80GiB", 80 << 30), ("80GB", 80 * 10**9), ("512M", 512 << 20), ("1.5g", 3 << 29)]
)
def test_memory_sizes_are_read_as_written(text: str, expected: int) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "80QB", "-1", "0", "1e3", "80 GiB 1"])
def test_a_size_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(LaunchError, match="80GiB") as error:
        parse_memory(text)
    assert repr(text) in str(error.value)


def test_sizes_are_shown_in_three_digits() -> None:
    assert [show_bytes(n) for n in (1 << 10, 3 << 29, 80 << 30, 999 << 20)] == [
        "1.00 KiB",
        "1.50 GiB",
        "80.0 GiB",
        "999.0 MiB",
    ]
