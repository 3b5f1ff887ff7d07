"""`ntp-compare` and `ntp-export` as commands: exit codes and the one line that they print."""

import json

import pytest
import torch
from ntp_launcher import compare_cli, export_cli
from ntp_launcher.ending import ending

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


def test_export_takes_the_newest_sound_checkpoint(tmp_path, capsys):
    torch.set_num_threads(1)
    config = saving_config()
    run_dir = tmp_path / "run"
    train(config, datasets_of(config), run_dir)
    (run_dir / "resolved.yaml").write_text(dump_yaml(config))
    assert export_cli.main([str(run_dir), str(tmp_path / "out")]) == 0
    assert "step 4 in float32" in capsys.readouterr().out
    (run_dir / "checkpoints" / "step-00000004" / "manifest.json").unlink()
    assert export_cli.main([str(run_dir), str(tmp_path / "older"), "--dtype", "bfloat16"]) == 0
    assert "step 2 in bfloat16" in capsys.readouterr().out
    assert export_cli.main([str(run_dir), str(tmp_path / "out")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert export_cli.main([str(run_dir), "/proc/x"]) == 2
    assert "cannot write '/proc/x': " in capsys.readouterr().err
    assert export_cli.main([str(run_dir), str(tmp_path / "new"), "--step", "3"]) == 2
    assert "there are: 2, 4" in capsys.readouterr().err
    flip(run_dir / "checkpoints" / "step-00000002" / "pieces-00000.safetensors", 30_000)
    assert export_cli.main([str(run_dir), str(tmp_path / "damaged")]) == 2
    assert "checksum" in capsys.readouterr().err
