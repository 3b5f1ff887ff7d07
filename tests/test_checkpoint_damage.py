"""What goes wrong on a disk: nothing that lies is loaded, nothing sound is lost, training goes on."""

import os
import random
import re
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ntp.checkpoint.load import load
from ntp.checkpoint.manifest import DamagedError, check_files, read_manifest
from ntp.checkpoint.pieces import read_tensor
from ntp.checkpoint.save import Saver
from ntp.checkpoint.store import CheckpointStore
from ntp.collectives import PeerLostError
from ntp.data import datasets_of
from ntp.errors import CheckpointError
from ntp.plan import make_plan
from ntp.testing import simulate
from ntp.trainer import Trainer
from tests.checkpoints import flip, saving_config, train

TP3 = {"dp": 1, "tp": 3}


@pytest.fixture(scope="module")
def data():
    torch.set_num_threads(1)
    return datasets_of(saving_config())


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory):
    """A run of two ranks with checkpoints of steps 2 and 4, and what it computed."""
    run_dir = tmp_path_factory.mktemp("saved")
    return run_dir, train(saving_config(parallel={"dp": 2, "tp": 1}), data, run_dir)


@pytest.fixture
def copy(saved, tmp_path):
    """A copy to damage."""
    shutil.copytree(saved[0] / "checkpoints", tmp_path / "checkpoints")
    return tmp_path


def newest(run_dir):
    return run_dir / "checkpoints" / "step-00000004"


def flip_in_piece(checkpoint, number):
    piece = read_manifest(checkpoint).pieces[number]
    flip(checkpoint / piece.file, piece.offset + random.Random(number).randrange(piece.bytes))


DAMAGE = {
    "a byte of a piece": lambda checkpoint: flip_in_piece(checkpoint, 5),
    "a byte of a header": lambda checkpoint: flip(checkpoint / "pieces-00001.safetensors", 40),
    "a byte of the manifest": lambda checkpoint: flip(checkpoint / "manifest.json", 400),
    "a file cut short": lambda checkpoint: os.truncate(checkpoint / "pieces-00000.safetensors", 5000),
    "a file cut by one byte": lambda checkpoint: os.truncate(
        checkpoint / "pieces-00000.safetensors", (checkpoint / "pieces-00000.safetensors").stat().st_size - 1
    ),
    "a missing file": lambda checkpoint: (checkpoint / "pieces-00001.safetensors").unlink(),
    "a missing manifest": lambda checkpoint: (checkpoint / "manifest.json").unlink(),
    "half a manifest": lambda checkpoint: os.truncate(checkpoint / "manifest.json", 1000),
    "an empty manifest": lambda checkpoint: os.truncate(checkpoint / "manifest.json", 0),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_older_one_taken(data, saved, copy, damage):
    DAMAGE[damage](newest(copy))
    run = train(saving_config(parallel=TP3), data, copy, resume="auto")
    assert [step.step for step in run.steps] == [3, 4]
    assert run.hashes == saved[1].hashes
    named = [line for line in run.said if "step-00000004' is damaged" in line]
    assert len(named) == 1
    assert "taking step-00000002" in named[0]


@pytest.mark.parametrize("damage", ["a byte of a piece", "a missing file", "half a manifest"])
def test_strict_refuses_it(data, copy, damage):
    DAMAGE[damage](newest(copy))
    with pytest.raises(CheckpointError, match=r"step-00000004.*is damaged.*--strict"):
        train(saving_config(parallel=TP3), data, copy, resume="auto", strict=True)


def test_every_flipped_piece_is_seen(saved, copy):
    checkpoint = newest(copy)
    manifest = read_manifest(checkpoint)
    for number, piece in enumerate(manifest.pieces):
        flip_in_piece(checkpoint, number)
        with pytest.raises(DamagedError, match=piece.tensor):
            read_tensor(checkpoint, manifest, piece.tensor)
        flip_in_piece(checkpoint, number)
        read_tensor(checkpoint, manifest, piece.tensor)


def test_without_a_sound_one_nothing_starts_afresh(data, copy):
    for step in ("step-00000002", "step-00000004"):
        (copy / "checkpoints" / step / "pieces-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no sound checkpoint is left"):
        train(saving_config(), data, copy, resume="auto")


def test_a_step_or_path_that_is_not_there_is_named(data, copy):
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3 in .*there are: 2, 4"):
        train(saving_config(), data, copy, resume="3")
    with pytest.raises(CheckpointError, match="nowhere"):
        train(saving_config(), data, copy, resume="nowhere")


def test_a_plain_file_is_no_checkpoint_whatever_its_name(copy):
    store = CheckpointStore(copy / "checkpoints")
    for name in ("step-00000009", "step-00000009.abcd.tmp"):
        (store.directory / name).touch()
    assert (store.steps(), store.unfinished(), store.newest()) == ([2, 4], [], 4)
    with pytest.raises(CheckpointError, match="there are: 2, 4"):
        store.candidates(9)


def test_a_directory_of_checkpoints_that_may_not_be_read_is_named(copy, monkeypatch):
    def refused(self):
        raise PermissionError(13, "Permission denied", str(self))

    store = CheckpointStore(copy / "checkpoints")
    monkeypatch.setattr(Path, "iterdir", refused)
    said = re.escape(f"cannot read the checkpoints in '{store.directory}': Permission denied")
    for listing in (store.steps, store.unfinished, store.candidates, store.newest):
        with pytest.raises(CheckpointError, match=said):
            listing()
    with pytest.raises(PermissionError):  # a new run says so, and leaves them where they are
        store.belong_to(None)


def test_another_model_is_refused_by_the_key_that_differs(data, copy):
    other = saving_config({**saving_config().model.model_dump(), "rms_norm_eps": 1e-4})
    with pytest.raises(
        CheckpointError, match=r"another model: model.rms_norm_eps is 1e-05 there, 0.0001 here"
    ):
        train(other, data, copy, resume="auto")


def test_a_lost_latest_costs_nothing(data, copy):
    (copy / "checkpoints" / "latest").unlink()
    assert train(saving_config(), data, copy, resume="auto").steps == ()


def test_what_a_killed_save_left_is_named_and_not_used(data, saved, copy):
    left = newest(copy).rename(copy / "checkpoints" / "step-00000004.0a1b2c3d.tmp")
    run = train(saving_config(parallel=TP3), data, copy, resume="auto")
    assert run.hashes == saved[1].hashes
    assert any(left.name in line for line in run.said)
    assert not left.exists()


# ---- a save that fails


def reports_of(config, data, directory, steps):
    """What every rank of a two-rank job is told about its saves."""
    plan = make_plan(config)

    def body(member):
        trainer = Trainer(config, plan, member.mesh, data, torch.device("cpu"))
        saver = Saver(member.mesh.host, config)
        for step in steps:
            saver.save(trainer.optimizer, step, CheckpointStore(directory), keep=0)
            trainer.step(step, saver.wait_staged)
        saver.finish()
        return saver.poll()

    return simulate(body, plan)


@contextmanager
def mounted(path, *options):
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(path)], capture_output=True)
    if done.returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_is_one_clear_error_everywhere_and_the_older_one_stays(data, tmp_path):
    config = saving_config(parallel={"dp": 2, "tp": 1})
    directory = tmp_path / "disk" / "checkpoints"
    with mounted(tmp_path / "disk", "-o", "size=1M"):
        reports = reports_of(config, data, directory, steps=(1, 2, 3))
        told = {tuple(report.error for report in rank) for rank in reports.values()}
        assert len(told) == 1
        (first, second, third), *_ = told
        assert first is None
        for error in (second, third):  # which rank fills the disk is a matter of timing
            assert re.fullmatch(r"rank [01]: No space left on device", error)
        store = CheckpointStore(directory)
        assert store.steps() == [1]
        assert store.latest() == 1
        assert store.unfinished() == []
        check_files(store.path(1), read_manifest(store.path(1)))


def test_a_read_only_directory_is_one_clear_error_and_nothing_is_lost(data, tmp_path):
    config = saving_config(parallel={"dp": 2, "tp": 1})
    directory = tmp_path / "disk" / "checkpoints"
    with mounted(tmp_path / "disk"):
        assert reports_of(config, data, directory, steps=(1,))[0][0].error is None
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        reports = reports_of(config, data, directory, steps=(2,))
        errors = {rank[0].error for rank in reports.values()}
        assert len(errors) == 1
        assert re.fullmatch(r"rank 0: Read-only file system \(step-00000002.*\)", errors.pop())
        assert CheckpointStore(directory).steps() == [1]


def test_a_writer_that_dies_is_one_clear_error_and_training_goes_on(data, saved, tmp_path, monkeypatch):
    from ntp.checkpoint import save

    def broken(path, shards):
        if path.name == "pieces-00001.safetensors" and "step-00000002" in path.parent.name:
            raise MemoryError("no host memory")
        return real(path, shards)

    real = save.write_shards
    monkeypatch.setattr(save, "write_shards", broken)
    config = saving_config(parallel={"dp": 2, "tp": 1})
    run = train(config, data, tmp_path)
    assert run.hashes == saved[1].hashes
    assert "checkpoint of step 2 failed, training goes on: rank 1: MemoryError: no host memory" in run.said
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [4]


def test_a_last_save_that_fails_is_made_once_more(data, saved, tmp_path, monkeypatch):
    from ntp.checkpoint import save

    def broken_once(path, shards):
        if "step-00000004" in path.parent.name:
            monkeypatch.setattr(save, "write_shards", real)
            raise MemoryError("no host memory")
        return real(path, shards)

    real = save.write_shards
    monkeypatch.setattr(save, "write_shards", broken_once)
    assert train(saving_config(), data, tmp_path).hashes == saved[1].hashes
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [2, 4]


def test_a_rank_that_goes_in_the_last_save_is_a_lost_peer_and_no_failed_save(data, tmp_path, monkeypatch):
    from ntp.checkpoint import save

    def lost(group, value):
        raise PeerLostError("connection closed")

    monkeypatch.setattr(save, "gather_values", lost)
    with pytest.raises(PeerLostError, match="lost touch with the other ranks"):
        train(saving_config(), data, tmp_path)


def test_a_last_save_that_fails_again_ends_the_run_with_an_error(data, tmp_path):
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(CheckpointError, match="the last checkpoint, of step 4, failed"):
        train(saving_config(), data, tmp_path)


def test_a_host_that_writes_elsewhere_is_noticed(data, tmp_path, monkeypatch):
    from ntp.checkpoint import save

    def elsewhere(path, shards):
        record, pieces = real(path, shards)
        if path.name == "pieces-00001.safetensors":
            path.unlink()
        return record, pieces

    real = save.write_shards
    monkeypatch.setattr(save, "write_shards", elsewhere)
    reports = reports_of(saving_config(parallel={"dp": 2, "tp": 1}), data, tmp_path, steps=(1,))
    assert "pieces-00001.safetensors: No such file" in reports[1][0].error


# ---- SIGKILL


def test_a_kill_at_any_moment_leaves_a_valid_checkpoint(data, tmp_path):
    """100 processes that save one checkpoint after the other, each killed at a random moment."""
    config = saving_config()
    rng = random.Random(0)
    directory = tmp_path / "checkpoints"
    interrupted = 0
    for number in range(100):
        child = os.fork()
        if child == 0:
            save_for_ever(config, data, directory, first=100 * number + 1)
        wait_for_a_checkpoint(directory, after=100 * number)
        time.sleep(rng.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        store = CheckpointStore(directory)
        interrupted += bool(store.unfinished())
        assert store.path(store.latest()).is_dir()
        for path in store.candidates():
            check_files(path, read_manifest(path))
        assert resumed_step(config, data, directory) == store.latest()
    assert interrupted > 10  # the moments were real ones


def save_for_ever(config, data, directory, first):
    """In a child process: never returns."""

    def body(member):
        trainer = Trainer(config, member.plan, member.mesh, data, torch.device("cpu"))
        saver = Saver(member.mesh.host, config)
        for step in range(first, first + 10**6):
            saver.save(trainer.optimizer, step, CheckpointStore(directory), keep=2)
            saver.finish()

    try:
        simulate(body, make_plan(config))
    finally:
        os._exit(1)


def wait_for_a_checkpoint(directory, after):
    deadline = time.monotonic() + 60
    while (CheckpointStore(directory).latest() or 0) <= after:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def resumed_step(config, data, directory):
    def body(member):
        trainer = Trainer(config, member.plan, member.mesh, data, torch.device("cpu"))
        return load("auto", directory, config, trainer.optimizer, member.mesh.host, strict=True).step

    return simulate(body, make_plan(config))[0]
