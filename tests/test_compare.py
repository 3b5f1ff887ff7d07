"""`ntp-compare` and `ntp-export` as commands: exit codes and the one line that they print."""

import json
import os
from pathlib import Path

import pytest
import torch
from ntp_launcher import compare_cli, export_cli
from ntp_launcher.ending import ending
from safetensors import SafetensorError

from ntp.checkpoint.store import CheckpointStore
from ntp.config import dump_yaml
from ntp.data import datasets_of
from ntp.run_directory import metrics_line
from ntp.trainer import StepResult
from tests.checkpoints import flip, saving_config, train


def write_run(path, losses, first=1, weights="aa", state="bb", config=None):
    """A run directory as a worker leaves it."""
    path.mkdir()
    (path / "resolved.yaml").write_text(dump_yaml(config or saving_config()))
    results = [StepResult(step, loss, 2 * loss, 1e-3, 100) for step, loss in enumerate(losses, start=first)]
    lines = [json.dumps(metrics_line(result, 0.5 + result.step, 0)) + "\n" for result in results]
    (path / "metrics.jsonl").write_text("".join(lines))
    summary = {"steps": results[-1].step, "weights_sha256": weights, "state_sha256": state}
    (path / "summary.json").write_text(json.dumps(summary))
    return path


@pytest.fixture
def compare(capsys):
    def run(a, b):
        code = compare_cli.main([str(a), str(b)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def test_equal_runs_are_equal_whatever_their_mesh(tmp_path, compare):
    a = write_run(tmp_path / "a", [5.0, 4.0])
    b = write_run(tmp_path / "b", [5.0, 4.0], config=saving_config(parallel={"dp": 2, "tp": 3}, every=1))
    assert compare(a, b) == (0, "equal: steps 1 to 2, weights and optimizer state\n")


def test_a_resumed_run_is_compared_from_where_it_began(tmp_path, compare):
    a, b = write_run(tmp_path / "a", [5.0, 4.0, 3.0, 2.0]), write_run(tmp_path / "b", [3.0, 2.0], first=3)
    assert compare(a, b)[0] == 0
    assert "steps 3 to 4" in compare(b, a)[1]


DIFFERENT = {
    "step 2: loss_bits": {"losses": [5.0, 4.0 + 1e-15]},
    "at the end: weights_sha256 aa and cc": {"weights": "cc"},
    "at the end: state_sha256 bb and cc": {"state": "cc"},
    "config: train.seed 0 and 1": {"config": saving_config(train={"seed": 1}), "losses": [1.0, 1.0]},
    "step 2: missing in": {"losses": [5.0]},
    "step 3: missing in": {"losses": [5.0, 4.0, 3.0]},
}


@pytest.mark.parametrize("message", DIFFERENT)
def test_the_first_difference_is_named(tmp_path, compare, message):
    a = write_run(tmp_path / "a", [5.0, 4.0])
    b = write_run(tmp_path / "b", **{"losses": [5.0, 4.0], **DIFFERENT[message]})
    code, line = compare(a, b)
    assert code == 1
    assert line.startswith(f"different: {message}")
    assert line.count("\n") == 1


def test_what_is_not_a_finished_run_is_named(tmp_path, compare):
    a, b = write_run(tmp_path / "a", [5.0]), write_run(tmp_path / "b", [5.0])
    (b / "summary.json").unlink()
    assert compare(a, b)[0] == 2
    assert "summary.json" in compare(a, b)[1]
    assert compare(a, tmp_path / "nowhere")[0] == 2
    (b / "metrics.jsonl").write_text("[1]\n")
    assert "is not what a run writes" in compare(a, b)[1]


def test_what_may_not_be_read_is_named(capsys):
    def refused():
        raise PermissionError(13, "Permission denied", "a/resolved.yaml")

    assert ending("ntp-compare", refused) == 2
    assert capsys.readouterr().err == "ntp-compare: cannot use 'a/resolved.yaml': Permission denied\n"


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A run with checkpoints of steps 2 and 4, in the folder `run` of the one that is worked in."""
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    config = saving_config()
    train(config, datasets_of(config), Path("run"))
    Path("run/resolved.yaml").write_text(dump_yaml(config))
    return Path("run/checkpoints")


@pytest.fixture
def export(capsys):
    def run(*arguments):
        code = export_cli.main(["run", *arguments])
        printed = capsys.readouterr()
        assert (code, printed.err.count("\n")) in ((0, 0), (2, 1))
        assert "Errno" not in printed.err
        return printed.out + printed.err

    return run


def test_export_takes_the_newest_sound_checkpoint(trained, export):
    assert "step 4 in float32" in export("out")
    (trained / "step-00000004" / "manifest.json").unlink()
    assert "step 2 in bfloat16" in export("older", "--dtype", "bfloat16")
    assert "'out' exists already" in export("out")
    assert "cannot write '/proc/x': " in export("/proc/x")
    assert "there are: 2, 4" in export("new", "--step", "3")


NEWEST = "checkpoint 'run/checkpoints/step-00000004' is damaged "
DAMAGE = {
    "(manifest.json: No such file or directory)": lambda path: (path / "manifest.json").unlink(),
    "(manifest.json: Is a directory)": lambda path: replaced_by_a_folder(path / "manifest.json"),
    "(manifest.json is not whole)": lambda path: os.truncate(path / "manifest.json", 1000),
    "(pieces-00000.safetensors: No such file or directory)": lambda path: pieces(path).unlink(),
    "(pieces-00000.safetensors has 5000 bytes instead of": lambda path: os.truncate(pieces(path), 5000),
    "(pieces-00000.safetensors: the checksum of its header": lambda path: flip(pieces(path), 40),
    "(pieces-00000.safetensors: the checksum of embedding.master": lambda path: flip(pieces(path), 30_000),
}


def pieces(checkpoint):
    return checkpoint / "pieces-00000.safetensors"


def replaced_by_a_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", DAMAGE)
def test_export_names_a_damaged_checkpoint_and_can_be_tried_again(trained, export, damage):
    DAMAGE[damage](trained / "step-00000004")
    assert NEWEST + damage in export("out", "--step", "4")
    assert not Path("out").exists()
    assert "step 2 in" in export("out", "--step", "2")


def test_export_names_the_newest_where_all_are_damaged(trained, export):
    for checkpoint in trained.glob("step-*"):
        pieces(checkpoint).unlink()
    assert NEWEST in export("out")


def test_export_says_where_the_checkpoints_of_earlier_runs_are(trained, export):
    CheckpointStore(trained).belong_to(None)
    assert f"no checkpoint in {str(trained)!r}; those of earlier runs lie in" in export("out")


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left"), SafetensorError("No space left (os error 28)")]
)
def test_an_export_that_cannot_be_written_leaves_nothing_behind(trained, export, monkeypatch, is_new, error):
    def full(*_, **__):
        raise error

    if not is_new:
        Path("out").mkdir()
    monkeypatch.setattr("ntp.export.save_file", full)
    assert "cannot write 'out': No space left\n" in export("out")
    assert [*Path().glob("out/*")] == []
    assert Path("out").exists() != is_new


@pytest.mark.parametrize("section", ["checkpoint: 3", "checkpoint: {dir: 3}", "model: {}"])
def test_export_needs_no_section_about_checkpoints(trained, export, section):
    Path("run/resolved.yaml").write_text(section)
    assert "step 4 in" in export("out")


def test_what_a_killed_export_has_left_is_written_over(trained, export):
    Path("out/.unfinished").mkdir(parents=True)
    Path("out/.unfinished/model-00001.safetensors.part").touch()
    assert "step 4 in" in export("out")
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
