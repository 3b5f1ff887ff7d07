"""Recovery on simulated ranks: whatever is lost, and wherever in a step, the bits stay the same."""

import ctypes
import gc
import time
from pathlib import Path

import pytest
import torch

from ntp import recovery
from ntp.data import datasets_of
from ntp.parameters import parameter_specs
from ntp.plan import make_plan
from ntp.protocol import Phase
from ntp.recovery import StateLostError, agree, carry, decide
from ntp.testing import simulate, simulate_processes
from ntp.trainer import Trainer
from tests.shapes import LLAMA, QWEN, make_config
from tests.training import train

CPU = torch.device("cpu")
STEPS = 4


class KilledError(Exception):
    """A simulated rank dies."""


class FaultAt:
    """A watch that kills its rank on entering a phase of a step."""

    def __init__(self, rank, victims, step, phase):
        self.armed = rank in victims
        self.step, self.phase = step, phase

    def enter(self, phase, step):
        if self.armed and (step, phase) == (self.step, self.phase):
            raise KilledError

    def microbatch(self, step, gradients):
        pass

    def wants_switch(self):
        return False


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def run_until_fault(config, plan, data, victims, step, phase):
    """Train until the victims die; the trainers of the survivors, as the fault left them."""
    trainers = {}

    def body(member):
        watch = FaultAt(member.rank, victims, step, phase)
        trainer = trainers[member.rank] = Trainer(config, plan, member.mesh, data, CPU, watch)
        for number in range(1, STEPS + 1):
            trainer.step(number)

    with pytest.raises(KilledError):
        simulate(body, plan)
    return {rank: trainer for rank, trainer in trainers.items() if rank not in victims}


def go_on(config, plan, data, survivors):
    """Recover into `plan` and train to the end; hashes and the steps that were computed."""

    def body(process):
        kept = [survivors[process.rank]] if process.rank in survivors else []

        def make():
            return process.mesh and Trainer(config, plan, process.mesh, data, CPU, initialise=False)

        decision = agree(config, process.world, kept)
        carry(config, plan, process.world, process.world, decision, kept, make)
        if not kept:
            return None
        (trainer,) = kept
        trainer.publish()
        steps = [trainer.step(s) for s in range(trainer.committed + 1, STEPS + 1)]
        return steps, trainer.result, trainer.hashes()

    results = simulate_processes(body, plan)
    assert not any(trainer.ddp.buffer.parameters.numel() for trainer in survivors.values())
    return results[plan.reporter]


CASES = [
    ({"dp": 2, "tp": 2}, (3,), 2, Phase.STEP),
    ({"dp": 2, "tp": 2}, (3,), 2, Phase.EXCHANGE),
    ({"dp": 2, "tp": 3}, (0,), 2, Phase.VOTE),
    ({"dp": 2, "tp": 2}, (1,), 2, Phase.UPDATE),
    ({"dp": 3, "tp": 2}, (4,), 3, Phase.UPDATE),
    ({"dp": 2, "tp": 2}, (2, 3), 2, Phase.UPDATE),
    ({"dp": 2, "tp": 2, "standbys": 1}, (3,), 2, Phase.UPDATE),
    ({"dp": 2, "tp": 2, "policy": "uniform"}, (3,), 2, Phase.EXCHANGE),
]


@pytest.mark.parametrize(("parallel", "victims", "step", "phase"), CASES)
def test_a_loss_at_any_point_of_a_step_changes_no_bit(parallel, victims, step, phase):
    model = QWEN if len(victims) > 1 else LLAMA
    config = make_config(model, parallel=parallel, train={"steps": STEPS, "global_batch": 4})
    data = datasets_of(config)
    unfailed = train(config, data)
    survivors = run_until_fault(config, make_plan(config), data, victims, step, phase)
    plan = make_plan(config, victims, generation=1)
    steps, _, hashes = go_on(config, plan, data, survivors)
    assert hashes == unfailed.hashes
    assert steps == list(unfailed.steps[STEPS - len(steps) :])
    assert len(steps) >= STEPS - step


@pytest.mark.parametrize("elements", [1, 1 << 40])
def test_state_travels_in_any_number_of_rounds(monkeypatch, elements):
    monkeypatch.setattr(recovery, "_ROUND_ELEMENTS", elements)
    config = make_config(LLAMA, parallel={"dp": 2, "tp": 2}, train={"steps": STEPS, "global_batch": 4})
    specs = parameter_specs(config.model)
    assert len(list(recovery._rounds(specs))) == (len(specs) if elements == 1 else 1)
    data = datasets_of(config)
    survivors = run_until_fault(config, make_plan(config), data, (3,), 2, Phase.VOTE)
    _, _, hashes = go_on(config, make_plan(config, (3,), generation=1), data, survivors)
    assert hashes == train(config, data).hashes


class LastToUpdate(FaultAt):
    """Kills its rank between vote and update, once all the others have updated."""

    def __init__(self, rank, late, step, trainers):
        super().__init__(rank, late, step, Phase.UPDATE)
        self.late, self.trainers = late, trainers

    def enter(self, phase, step):
        if self.armed and (step, phase) == (self.step, self.phase):
            others = [trainer for rank, trainer in self.trainers.items() if rank not in self.late]
            deadline = time.monotonic() + 30
            while any(trainer.committed < step for trainer in others) and time.monotonic() < deadline:
                time.sleep(0.01)
            raise KilledError


def test_a_worker_that_has_voted_finishes_the_step_that_another_has_made():
    """Ranks 0 and 3 are stopped between vote and update of step 2; rank 3 is lost, rank 0 lives on."""
    config = make_config(parallel={"dp": 2, "tp": 2}, train={"steps": STEPS, "global_batch": 4})
    data, plan = datasets_of(config), make_plan(config)
    unfailed, trainers = train(config, data), {}

    def body(member):
        watch = LastToUpdate(member.rank, {0, 3}, 2, trainers)
        trainer = trainers[member.rank] = Trainer(config, plan, member.mesh, data, CPU, watch)
        for number in range(1, STEPS + 1):
            trainer.step(number)

    with pytest.raises(KilledError):
        simulate(body, plan)
    assert [trainers[rank].committed for rank in range(4)] == [1, 2, 2, 1]
    survivors = {rank: trainers[rank] for rank in range(3)}
    steps, _, hashes = go_on(config, make_plan(config, {3}, generation=1), data, survivors)
    assert steps == list(unfailed.steps[2:]), "step 2 was not computed again"
    assert hashes == unfailed.hashes


def test_a_rank_that_returns_without_state_is_given_its_share():
    config = make_config(parallel={"dp": 2, "tp": 2}, train={"steps": STEPS, "global_batch": 4})
    data = datasets_of(config)
    unfailed = train(config, data)
    survivors = run_until_fault(config, make_plan(config, {3}), data, {2}, 3, Phase.STEP)
    _, _, hashes = go_on(config, make_plan(config, {2}, generation=1), data, survivors)
    assert hashes == unfailed.hashes


def test_a_loss_of_the_only_copy_is_an_error_on_every_rank():
    config = make_config(
        parallel={"dp": 2, "tp": 2}, train={"steps": STEPS, "global_batch": 4}, optimizer={"copies": 1}
    )
    data = datasets_of(config)
    survivors = run_until_fault(config, make_plan(config), data, {1}, 2, Phase.STEP)
    with pytest.raises(StateLostError, match="no live rank"):
        go_on(config, make_plan(config, {1}, generation=1), data, survivors)


def entry(layout, step, failed=()):
    return {"layout": layout, "failed": list(failed), "step": step, "result": None}


def test_the_newest_layout_that_is_whole_wins():
    config = make_config(parallel={"dp": 2, "tp": 2})
    half_moved = {0: [entry(0, 5), entry(1, 5, {3})], 1: [entry(0, 5)], 2: [entry(0, 5)]}
    assert decide(config, half_moved).layout == 0
    dropped = {0: [entry(1, 5, {3})], 1: [entry(0, 5), entry(1, 5, {3})], 2: [entry(1, 5, {3})]}
    assert decide(config, dropped).layout == 1
    fresh = {0: [entry(0, 5)], 1: [entry(0, 6)], 2: [entry(0, 6)], 3: []}
    assert (decide(config, fresh).step, decide(config, fresh).alive) == (6, (0, 1, 2))
    assert decide(config, {0: [], 1: []}).layout is None


def test_fifty_losses_and_returns_change_no_bit_and_keep_memory_flat():
    config = make_config(
        {**LLAMA, "num_hidden_layers": 1},
        parallel={"dp": 2, "tp": 2},
        train={"steps": 50, "global_batch": 2, "seq_len": 8},
    )
    data = datasets_of(config)
    unfailed = train(config, data)
    kept, tensors, resident = {rank: [] for rank in range(4)}, [], []

    def one_step(process):
        trainers = kept[process.rank]

        def make(initialise=False):
            mesh = process.mesh
            return mesh and Trainer(config, process.plan, mesh, data, CPU, initialise=initialise)

        decision = agree(config, process.world, trainers)
        if decision.layout is None:
            trainers[:] = [make(initialise=True)]
        else:
            carry(config, process.plan, process.world, process.world, decision, trainers, make)
            trainers[0].publish()
        trainers[0].step(trainers[0].committed + 1)
        return trainers[0].hashes() if trainers[0].committed == 50 else None

    for generation in range(50):
        lost = generation % 5
        plan = make_plan(config, {lost} if lost < 4 else (), generation)
        if lost < 4:
            kept[lost] = []
        results = simulate_processes(one_step, plan)
        gc.collect()
        tensors.append(live_tensors())
        resident.append(resident_bytes())
    assert results[plan.reporter] == unfailed.hashes
    assert tensors[-1] == tensors[9]  # the same mesh
    assert resident[-1] < 1.02 * resident[24]


def live_tensors():
    return sum(type(thing) is torch.Tensor for thing in gc.get_objects())


def resident_bytes():
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator merely holds back is not in use
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
