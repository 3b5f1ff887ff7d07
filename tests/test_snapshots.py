"""State that no live rank keeps comes back from host memory, and the bits stay the same."""

import json

import torch

from tests.test_end_to_end import SHORT, launch, one_rank

ONE_COPY = ("--set", "parallel.tp=2", "--set", "optimizer.copies=1", "--set", "elastic.rejoin=never")


def test_the_loss_of_an_only_copy_goes_back_to_the_snapshot(tmp_path):
    fault = ("--set", "faults=[{kill: {rank: 1, step: 4}}]")
    snapshots = ("--set", "elastic.snapshot_every=2", "--set", "train.steps=5")
    torch.set_num_threads(1)
    _, unfailed = one_rank("tiny-cpu.yaml", *SHORT, "--set", "train.steps=5")
    lines, summary = launch(tmp_path / "lost", "tiny-cpu.yaml", *SHORT, *ONE_COPY, *snapshots, *fault)
    assert summary["state_sha256"] == unfailed["state_sha256"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    (recovery,) = summary["recoveries"]
    assert (recovery["source"], recovery["steps_replayed"]) == ("snapshot", 1), json.dumps(recovery)
