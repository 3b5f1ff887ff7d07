"""Rehearsals: the roles that one loss can bring, and a step in each of them that leaves nothing behind."""

import gc
import weakref

import pytest
import torch
from torch.distributed import HashStore

from ntp import rehearsal
from ntp.collectives import Group
from ntp.control import Control
from ntp.data import datasets_of
from ntp.mirror import MirrorFabric
from ntp.model import Model
from ntp.plan import make_plan
from ntp.protocol import GENERATION, Generation
from ntp.rehearsal import Role, rehearse, roles
from ntp.testing import simulate
from ntp.trainer import Trainer
from tests.shapes import LLAMA, QWEN, make_config
from tests.test_peer_exchange_gpu import MODEL
from tests.training import train

CPU = torch.device("cpu")


def test_the_role_of_the_plan_comes_first_then_those_after_one_loss():
    config = make_config(LLAMA, parallel={"dp": 2, "tp": 4})
    assert roles(config, (), 5) == [Role(4, 1), Role(3, 0), Role(3, 1)]
    assert roles(config, {4, 6}, 7) == [Role(2, 1), Role(1, 0)]
    assert roles(config, {5, 6, 7}, 4) == [Role(1, 0)]


@pytest.mark.parametrize(
    ("parallel", "failed"),
    [
        ({"dp": 2, "tp": 4}, ()),
        ({"dp": 2, "tp": 4, "policy": "uniform"}, (6,)),
        ({"dp": 2, "tp": 3, "standbys": 1}, ()),
        ({"dp": 3, "tp": 3, "standbys": 1}, (0, 4)),
        ({"dp": 2, "tp": 4, "min_degree": 3}, (1,)),
    ],
)
def test_every_degree_that_any_one_loss_brings_is_rehearsed(parallel, failed):
    config = make_config(LLAMA, parallel=parallel)
    world = make_plan(config, failed).world
    for rank in world:
        rehearsed = {role.degree for role in roles(config, failed, rank)}
        for lost in world:
            plan = make_plan(config, {*failed, lost})
            if rank in plan.workers:
                assert plan.replica_of(rank).degree in rehearsed, (rank, lost)


def test_a_standby_rehearses_the_place_that_it_would_take():
    config = make_config(LLAMA, parallel={"dp": 2, "tp": 3, "standbys": 1})
    assert Role(3, 0) in roles(config, (), 6)
    assert all(role.degree == 3 for role in roles(config, (), 6))


def test_where_the_only_rank_has_nobody_to_lose_it_rehearses_its_own_role():
    assert roles(make_config(LLAMA, parallel={"dp": 1, "tp": 1}), (), 0) == [Role(1, 0)]


@pytest.mark.parametrize("model", [LLAMA, QWEN])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("role", [Role(1, 0), Role(3, 2), Role(4, 3)])
def test_a_step_alone_launches_products_of_the_sizes_of_the_role(monkeypatch, model, dtype, role):
    config = make_config(model, parallel={"dp": 2, "tp": 4}, train={"steps": 3, "dtype": dtype})
    seen: list[Trainer] = []
    step = Trainer.publish
    monkeypatch.setattr(Trainer, "publish", lambda trainer: (seen.append(trainer), step(trainer))[1])
    rehearse(config, role, datasets_of(config), CPU)
    owners = make_plan(make_config(model, parallel={"dp": 1, "tp": role.degree})).replicas[0].owners
    units = {kind: len(tables[role.position]) for kind, tables in owners.items()}
    trainer = seen[-1]
    for spec in trainer.ddp.buffer.specs:
        held = trainer.ddp.buffer.held[spec.name]
        assert len(held) == (units[spec.kind] if spec.kind else 1)
    assert all(
        weight.gemm_flops for name, weight in trainer.weights.items() if name.endswith(("qkv", "down"))
    )


def test_it_changes_no_bit_of_the_training_that_follows():
    config = make_config(LLAMA, parallel={"dp": 1, "tp": 2}, train={"steps": 2, "dtype": "bfloat16"})
    data = datasets_of(config)
    expected = train(config, data)
    for role in roles(config, (), 1):
        rehearse(config, role, data, CPU)
    assert train(config, data) == expected


@pytest.fixture
def trainers(monkeypatch):
    """The rehearsals' trainers, as far as they live."""
    made: list[weakref.ref[Trainer]] = []

    def make(*what, **more):
        trainer = Trainer(*what, **more)
        made.append(weakref.ref(trainer))
        return trainer

    monkeypatch.setattr(rehearsal, "Trainer", make)
    return made


def test_nothing_of_it_stays(trainers):
    config = make_config(LLAMA, parallel={"dp": 1, "tp": 2})
    assert rehearse(config, Role(2, 1), datasets_of(config), CPU)
    assert [trainer() for trainer in trainers] == [None]


def test_one_without_room_is_left_out_and_leaves_nothing(trainers, monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Model, "loss", fails)
    config = make_config(LLAMA, parallel={"dp": 1, "tp": 2})
    assert not rehearse(config, Role(2, 1), datasets_of(config), CPU)
    assert [trainer() for trainer in trainers] == [None]


def test_a_trainer_that_is_dropped_needs_no_collection_to_free_its_gradients():
    config = make_config(LLAMA, train={"grad_group": 1})
    gradients = []

    def body(member):
        trainer = Trainer(config, make_plan(config), member.mesh, datasets_of(config), CPU)
        trainer.step(1)
        gradients.extend(weakref.ref(flat.untyped_storage()) for flat in trainer.ddp.buffer._free)
        trainer.retire()

    gc.collect()
    gc.disable()
    try:
        simulate(body, make_plan(config))
        assert gradients
        assert not [storage() for storage in gradients if storage() is not None]
    finally:
        gc.enable()


def test_a_mirrored_group_gives_the_shapes_of_a_real_one():
    fabric = MirrorFabric(1, CPU)
    group = fabric.group((0, 1, 2))
    assert isinstance(group, Group)
    assert fabric.group((0, 2)) is None
    mine = torch.arange(6.0).view(2, 3)
    everyone = group.all_gather(mine, [3, 2, 1])
    assert everyone.tolist() == [*mine.tolist(), [0.0] * 3, *mine.tolist(), mine[0].tolist()]
    output = torch.ones(4)
    group.all_to_all(output, torch.ones(6), [1, 2, 1], [2, 2, 2]).wait()
    assert not output.any()
    total = torch.tensor([5])
    group.all_reduce(total)
    assert total.item() == 5


def test_a_worker_that_comes_late_plans_for_those_that_are_there_and_itself():
    store = HashStore()
    control = Control(lambda: store, rank=3)
    try:
        assert control.absent() == set()
        store.set(GENERATION, Generation(2, [1, 3], False, "", 0.0).to_json())
        while control.absent() != {1}:
            pass
    finally:
        control.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("exchange", ["peer", "collective"])
def test_on_a_gpu_it_gives_the_memory_back(exchange):
    from ntp import peer_memory

    config = make_config(
        MODEL,
        parallel={"dp": 1, "tp": 2, "exchange": exchange},
        train={"dtype": "bfloat16", "device": "cuda", "seq_len": 1024},
    )
    device, data = torch.device("cuda", 0), datasets_of(config)
    for role in roles(config, (), 1):
        rehearse(config, role, data, device)
        before, held = torch.cuda.memory_allocated(device), peer_memory.allocated_bytes()
        rehearse(config, role, data, device)
        assert torch.cuda.memory_allocated(device) == before
        assert peer_memory.allocated_bytes() == held == 0
