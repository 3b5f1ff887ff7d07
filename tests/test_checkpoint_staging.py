"""Between a commit and the next one the state travels to host memory: whole, and as it was."""

import errno
import gc
import os
import threading
import weakref

import pytest
import torch

from ntp.checkpoint import staging
from ntp.checkpoint.save import Saver
from ntp.checkpoint.staging import Staging
from ntp.checkpoint.store import CheckpointStore
from ntp.data import datasets_of
from ntp.life import Job, _Era
from ntp.optim import DistributedOptimizer
from ntp.parameters import BLOCK, parameter_specs
from ntp.plan import make_plan
from ntp.testing import simulate
from ntp.trainer import make_weights, wrap
from tests.checkpoints import saving_config, train


@pytest.fixture(scope="module")
def data():
    torch.set_num_threads(1)
    return datasets_of(saving_config())


def stagings(config):
    """One for every rank, of an optimizer whose state is a count from 1 on."""

    def body(member):
        specs = parameter_specs(config.model)
        weights = make_weights(specs, member.plan, member.rank)
        _, optimizer = wrap(specs, weights, member.plan, member.mesh, config.optimizer)
        for number, flat in enumerate(optimizer.flats):
            flat.copy_(torch.arange(1, len(flat) + 1) + number / 4)
        return optimizer, Staging(optimizer)

    return simulate(body, make_plan(config)).values()


def test_a_late_copy_is_of_the_step_that_it_was_asked_for(data, tmp_path, monkeypatch):
    """A copy that ends when the update waits for it, or else after the update.

    Each checkpoint leads to the end of the run that saved nothing.
    """
    unsaved = train(saving_config(every=0), data, tmp_path / "unsaved")
    copy, wait_staged, update = Staging._copy, Saver.wait_staged, DistributedOptimizer.update
    release = threading.Event()

    def late(self):
        release.clear()
        release.wait(timeout=3)  # in vain after the last step
        copy(self)

    def waits(self):
        timer = threading.Timer(0.3, release.set)
        timer.start()
        wait_staged(self)
        timer.cancel()

    def updates(self, *settings):
        update(self, *settings)
        release.set()

    monkeypatch.setattr(Staging, "_copy", late)
    monkeypatch.setattr(Saver, "wait_staged", waits)
    monkeypatch.setattr(DistributedOptimizer, "update", updates)
    saving = train(saving_config(every=1, keep=0), data, tmp_path)
    assert saving.hashes == unsaved.hashes
    for step in (1, 2, 3):
        resumed = train(saving_config(every=0), data, tmp_path, resume=str(step))
        assert resumed.steps == unsaved.steps[step:]
        assert resumed.hashes == unsaved.hashes


def test_memory_that_cannot_be_had_fails_the_save_on_every_rank_and_nothing_else(monkeypatch, tmp_path):
    config = saving_config(parallel={"dp": 1, "tp": 2})

    def refused(self, elements, device):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    def body(member):
        specs = parameter_specs(config.model)
        weights = make_weights(specs, member.plan, member.rank)
        _, optimizer = wrap(specs, weights, member.plan, member.mesh, config.optimizer)
        saver, store = Saver(member.mesh.host, config), CheckpointStore(tmp_path)
        if member.rank == 1:
            monkeypatch.setattr(staging.HostMemory, "__init__", refused)
        saver.save(optimizer, 1, store, keep=0)
        saver.wait_staged()
        saver.finish()
        return [report.error for report in saver.poll()], store.steps()

    for errors, steps in simulate(body, make_plan(config)).values():
        assert "Cannot allocate memory" in errors[0]
        assert not steps


def test_every_element_arrives_through_copies_of_any_size(monkeypatch):
    monkeypatch.setattr(staging, "COPY_ELEMENTS", BLOCK + 100)
    for optimizer, made in stagings(saving_config(parallel={"dp": 2, "tp": 2})):
        made.copier()()
        parts = [part for part in optimizer.slices if part.counts]
        expected = [part.of(flat) for part in parts for flat in optimizer.flats]
        assert all(torch.equal(s.values, e) for s, e in zip(made.shards, expected, strict=True))


def test_host_memory_holds_what_a_rank_saves_and_no_second_copy():
    config = saving_config(parallel={"dp": 2, "tp": 2})
    held = sum(made._memory.values.numel() for _, made in stagings(config))
    assert held == 3 * BLOCK * sum(spec.units * spec.blocks for spec in parameter_specs(config.model))


def test_no_copy_crosses_from_one_pinned_range_to_the_next(monkeypatch):
    """The driver pins ranges; a copy engine refuses a copy that is in two of them."""
    monkeypatch.setattr(staging, "COPY_ELEMENTS", 3000)
    monkeypatch.setattr(staging, "_PINNED_AT_ONCE", 9000)
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", FakeDevice)
    for _, made in stagings(saving_config()):
        made._memory._pin(torch.device("cuda", 0))
        assert sum(runtime.pinned.values()) == 4 * made._memory.values.numel()
        for _, host in made._copies:
            first, stop = host.data_ptr(), host.data_ptr() + 4 * host.numel()
            assert any(start <= first and stop <= start + size for start, size in runtime.pinned.items())
        del made._memory
        assert not runtime.pinned  # given back


def test_few_copies_are_queued_at_a_time(monkeypatch):
    """Whatever the trainer reads from the device stands behind those that are."""
    monkeypatch.setattr(staging, "COPY_ELEMENTS", 3000)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", FakeDevice)
    monkeypatch.setattr(FakeEvent, "pending", 0)
    monkeypatch.setattr(FakeEvent, "most", 0)
    ((optimizer, made),) = stagings(saving_config())
    made._copy_behind(FakeStream())
    assert len(made._copies) > 2 * staging._QUEUED
    assert FakeEvent.most == staging._QUEUED
    parts = [part for part in optimizer.slices if part.counts]
    assert all(
        torch.equal(s.values, p.of(optimizer.master)) for s, p in zip(made.shards[::3], parts, strict=True)
    )


def test_a_generation_that_is_over_is_forgotten_at_once(tmp_path):
    """On the reporter too, and without a search for cycles: it holds the state of an old layout."""
    config, said = saving_config(), []
    job = Job(config, 0, tmp_path, None, False, torch.device("cpu"), None, said.append, None)

    def body(member):
        era = _Era(job, None, None, member.plan, member.mesh.host, member.mesh, 0.0)
        era._checkpoints._say("a note")
        return weakref.ref(era)

    gc.disable()
    try:
        (era,) = simulate(body, make_plan(config)).values()
        assert era() is None
    finally:
        gc.enable()
    assert said == ["a note"]


class FakeRuntime:
    """What CUDA knows to be pinned: address -> bytes."""

    def __init__(self):
        self.pinned = {}

    def cudaHostRegister(self, address, size, flags):  # noqa: N802 - CUDA's name
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802 - CUDA's name
        del self.pinned[address]


class FakeDevice:
    def __init__(self, device):
        self.device = device

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        return None


class FakeEvent:
    """Counts what has been queued and not waited for."""

    pending = most = 0

    def __init__(self, blocking=False):
        assert blocking  # a thread that waits leaves its core to others

    def record(self, stream):
        FakeEvent.pending += 1
        FakeEvent.most = max(FakeEvent.most, FakeEvent.pending)

    def synchronize(self):
        FakeEvent.pending -= 1


class FakeStream:
    def synchronize(self):
        FakeEvent.pending = 0
