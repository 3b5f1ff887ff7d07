"""A checkpoint outlives its mesh: what was saved on one is loaded on any other, element for element."""

import dataclasses
import time

import hypothesis
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies

from ntp.checkpoint.load import load
from ntp.checkpoint.manifest import read_manifest
from ntp.checkpoint.pieces import optimizer_shards, read_tensor, tensor_shapes
from ntp.checkpoint.save import Saver
from ntp.checkpoint.store import CheckpointStore
from ntp.data import datasets_of
from ntp.parameters import parameter_specs
from ntp.plan import make_plan
from ntp.testing import simulate
from ntp.trainer import make_weights, wrap
from tests.checkpoints import manifest_body, mend, saving_config, train
from tests.shapes import LLAMA, ODD, make_config

SMALL = {**LLAMA, "num_hidden_layers": 1, "qkv_bias": True, "qk_norm": True}
MESHES = [
    ({"dp": 2, "tp": 4}, ()),
    ({"dp": 2, "tp": 4}, (3, 5)),
    ({"dp": 1, "tp": 1}, ()),
    ({"dp": 1, "tp": 3}, ()),
    ({"dp": 4, "tp": 2}, ()),
]


@pytest.fixture(scope="module")
def data():
    torch.set_num_threads(1)
    return datasets_of(saving_config())


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run on 2 x TP4 that never stopped and saved after every second step."""
    run_dir = tmp_path_factory.mktemp("whole")
    return run_dir, train(saving_config(parallel={"dp": 2, "tp": 4}), data, run_dir)


@pytest.mark.parametrize(("parallel", "failed"), MESHES)
def test_a_run_resumes_on_any_mesh_with_the_same_bits(data, whole, tmp_path, parallel, failed):
    source, run = whole
    config = saving_config(parallel=parallel)
    resumed = train(config, data, tmp_path, failed, resume=str(source / "checkpoints" / "step-00000002"))
    assert [step.step for step in resumed.steps] == [3, 4]
    assert resumed.steps == run.steps[2:]
    assert resumed.hashes == run.hashes


def test_a_run_that_is_stopped_goes_on_where_it_was(data, whole, tmp_path):
    config = saving_config(parallel={"dp": 1, "tp": 3}, every=0, train={"stop_after": 3})
    stopped = train(config, data, tmp_path)
    assert len(stopped.steps) == 3
    going_on = config.model_copy(update={"train": config.train.model_copy(update={"stop_after": None})})
    resumed = train(going_on, data, tmp_path, resume="auto")
    assert stopped.steps + resumed.steps == whole[1].steps
    assert resumed.hashes == whole[1].hashes


def test_one_stored_weight_changes_the_final_hash(data, whole, tmp_path):
    train(saving_config(train={"stop_after": 2}), data, tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step-00000002"
    piece = next(p for p in read_manifest(checkpoint).pieces if p.tensor == "layers.0.down.master")
    path = checkpoint / piece.file
    content = bytearray(path.read_bytes())
    content[piece.offset + 2] ^= 0x40  # a bit of the mantissa of the first element
    path.write_bytes(content)
    mend(checkpoint)
    resumed = train(saving_config(), data, tmp_path, resume="2")
    assert resumed.hashes.weights_sha256 != whole[1].hashes.weights_sha256


def test_auto_starts_a_new_run_where_nothing_was_saved(data, tmp_path):
    run = train(saving_config(train={"steps": 1}), data, tmp_path, resume="auto")
    assert [step.step for step in run.steps] == [1]
    assert any("starting from step 0" in line for line in run.said)


def test_a_run_that_began_elsewhere_goes_on_from_there_until_it_has_saved_one(data, whole, tmp_path):
    source = whole[0] / "checkpoints" / "step-00000002"
    train(saving_config(every=0), data, tmp_path, resume=str(source))
    again = train(saving_config(every=0), data, tmp_path, resume="auto")
    assert again.steps == whole[1].steps[2:]
    assert again.hashes == whole[1].hashes
    train(saving_config(every=3, train={"stop_after": 3}), data, tmp_path, resume="auto")
    assert [step.step for step in train(saving_config(), data, tmp_path, resume="auto").steps] == [4]


def test_a_new_run_does_not_go_on_where_an_earlier_one_began(data, whole, tmp_path):
    train(saving_config(every=0), data, tmp_path, resume=str(whole[0]))
    train(saving_config(every=0), data, tmp_path)
    again = train(saving_config(every=0), data, tmp_path, resume="auto")
    assert [step.step for step in again.steps] == [1, 2, 3, 4]


def test_the_newest_are_kept(data, tmp_path):
    train(saving_config(every=1, keep=2), data, tmp_path)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step-00000003", "step-00000004"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000004\n"


def test_an_old_one_that_may_not_be_removed_costs_no_save(data, tmp_path, monkeypatch):
    remove = CheckpointStore._remove

    def refused(store, path):
        if path.name == "step-00000001":
            raise PermissionError(13, "Permission denied", str(path))
        remove(store, path)

    monkeypatch.setattr(CheckpointStore, "_remove", refused)
    run = train(saving_config(every=1, keep=1), data, tmp_path)
    assert not any("failed" in line for line in run.said)
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [1, 4]


def test_a_run_that_goes_back_saves_over_the_future_it_left(data, whole, tmp_path):
    train(saving_config(every=1, keep=0), data, tmp_path)
    store = CheckpointStore(tmp_path / "checkpoints")
    train(saving_config(every=1, keep=0, train={"stop_after": 2}), data, tmp_path, resume="1")
    assert store.latest() == 2
    assert store.steps() == [1, 2, 3, 4]
    assert store.candidates()[0].name == "step-00000002"
    again = train(saving_config(every=1, keep=0), data, tmp_path, resume="auto")
    assert [step.step for step in again.steps] == [3, 4]
    assert again.hashes == whole[1].hashes


def test_a_new_run_takes_no_checkpoint_of_an_earlier_one_for_its_own(data, tmp_path):
    train(saving_config(), data, tmp_path)
    store = CheckpointStore(tmp_path / "checkpoints")
    for earlier in (1, 2):
        run = train(saving_config(train={"stop_after": 1, "seed": earlier}), data, tmp_path)
        assert any(f"moved to {store.directory / f'earlier-{earlier}'}" in line for line in run.said)
        assert (store.steps(), store.newest()) == ([1], 1)
    assert CheckpointStore(store.directory / "earlier-1").steps() == [2, 4]
    again = train(saving_config(train={"seed": 2}), data, tmp_path, resume="auto")
    assert [step.step for step in again.steps] == [2, 3, 4]


def test_a_future_that_a_run_has_left_is_none_to_go_back_to(data, tmp_path):
    train(saving_config(every=1, keep=0), data, tmp_path)
    store = CheckpointStore(tmp_path / "checkpoints")
    train(saving_config(every=3, keep=0, train={"stop_after": 3}), data, tmp_path, resume="1")
    train(saving_config(every=0, keep=0), data, tmp_path, resume="2")
    assert (store.steps(), store.newest()) == ([1, 2, 3, 4], 2)


def test_a_checkpoint_records_no_mesh(whole):
    body = manifest_body(whole[0] / "checkpoints" / "step-00000004")
    assert body.keys() == {"format", "step", "numerics", "config", "shapes", "files", "pieces"}
    assert body["step"] == 4


def test_changed_settings_are_named(data, whole, tmp_path):
    config = saving_config(train={"seed": 7})
    run = train(config, data, tmp_path, resume=str(whole[0]))
    assert run.steps == ()
    assert any("train.seed was 0, now 7" in line for line in run.said)


# ---- one element after the other


class Filled:
    """An optimizer whose every element says which it is."""

    def __init__(self, member, config):
        specs = parameter_specs(config.model)
        weights = make_weights(specs, member.plan, member.rank)
        _, self.optimizer = wrap(specs, weights, member.plan, member.mesh, config.optimizer)

    def fill(self):
        for number, shard in enumerate(self.shards()):
            shard.values.copy_(expected(shard, number % 3))

    def shards(self):
        return optimizer_shards(self.optimizer)


def expected(shard, kind):
    """Values that name tensor, unit and element: float32 holds each of them exactly."""
    elements = torch.arange(shard.start, shard.stop)
    units = torch.arange(shard.units.start, shard.units.stop)[:, None]
    seed = sum(shard.tensor.encode()) % 97
    return (elements % 1021 + 1021 * (units % 61) + 62281 * kind + 186843 * (seed % 80)).float()


@strategies.composite
def meshes(draw):
    dp, tp = draw(strategies.integers(1, 3)), draw(strategies.integers(1, 4))
    ranks = list(range(dp * tp))
    failed = draw(strategies.lists(strategies.sampled_from(ranks), unique=True, max_size=len(ranks) - 1))
    return {"dp": dp, "tp": tp}, tuple(failed)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    source=meshes(), target=meshes(), shape=strategies.sampled_from([SMALL, {**ODD, "ffn_unit": 512}])
)
def test_every_element_arrives_under_any_plan(tmp_path_factory, source, target, shape):
    directory = tmp_path_factory.mktemp("plans")

    def save(member):
        filled = Filled(member, config)
        filled.fill()
        saver = Saver(member.mesh.host, config)
        saver.save(filled.optimizer, 1, CheckpointStore(directory), keep=1)
        saver.finish()
        return saver.poll()[0].error

    def check(member):
        filled = Filled(member, config)
        loaded = load("auto", directory, config, filled.optimizer, member.mesh.host)
        assert loaded.step == 1
        for number, shard in enumerate(filled.shards()):
            assert torch.equal(shard.values, expected(shard, number % 3)), shard.tensor
        return len(filled.shards())

    config = make_config(shape, parallel=source[0])
    assert set(simulate(save, make_plan(config, source[1])).values()) == {None}
    config = make_config(shape, parallel=target[0])
    assert sum(simulate(check, make_plan(config, target[1])).values()) > 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint_reads_it_as_it_stands(whole):
    checkpoint = whole[0] / "checkpoints" / "step-00000004"
    manifest = read_manifest(checkpoint)
    shapes = tensor_shapes(parameter_specs(saving_config().model))
    state = {name: torch.empty(shape) for name, shape in shapes.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
    for name, values in state.items():
        assert torch.equal(values, read_tensor(checkpoint, manifest, name)), name


def test_training_does_not_wait_for_the_disk(data, whole, tmp_path, monkeypatch):
    """A writer that is slow holds up the next save and nothing else; the bits stay."""
    events = []
    real = Saver._publish

    def slow(self, job, *rest):
        time.sleep(0.3)
        events.append(("written", job.step))
        real(self, job, *rest)

    monkeypatch.setattr(Saver, "_publish", slow)
    run = train(saving_config(every=1), data, tmp_path)
    assert events == [("written", step) for step in (1, 2, 3, 4)]
    assert dataclasses.replace(run, said=[]) == dataclasses.replace(whole[1], said=[])
