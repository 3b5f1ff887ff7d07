"""The table of meshes: what a case is, and what its row says beside the others."""

import argparse
import json
import subprocess

import pytest

from tests.bench import meshes
from tests.bench.meshes import Case, differs, read, share


def run_directory(path, weights="w", tokens=100, times=(9.0, 9.0, 9.0, 0.5, 0.25, 0.5), recoveries=()):
    path.mkdir()
    lines = [{"step_time_s": seconds, "tokens": tokens} for seconds in (None, *times)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {"weights_sha256": weights, "state_sha256": "s", "loss_bits": "b", "recoveries": recoveries}
    (path / "summary.json").write_text(json.dumps(summary))
    return path


@pytest.mark.parametrize(
    ("text", "failed", "variables", "alive"),
    [
        ("2x2", (), {}, 1.0),
        ("2x2:0,3", (0, 3), {}, 0.5),
        (
            "1x4:3@NCCL_ALGO=Tree@NCCL_MAX_NCHANNELS=2",
            (3,),
            {"NCCL_ALGO": "Tree", "NCCL_MAX_NCHANNELS": "2"},
            0.75,
        ),
    ],
)
def test_a_case_names_mesh_losses_and_environment(tmp_path, text, failed, variables, alive):
    case = Case.parse(text)
    assert (case.failed, case.variables, case.alive) == (failed, variables, alive)
    command = case.command("job.yaml", ["train.steps=20"], tmp_path)
    assert f"parallel.tp={case.tp}" in command
    assert command[-1] == "train.steps=20"
    assert ("--failed" in command) == bool(failed)


@pytest.mark.parametrize("text", ["2", "2x", "2x2:", "2x2:a", "2x2@NCCL"])
def test_what_is_no_mesh_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no mesh"):
        Case.parse(text)


def test_speed_is_that_of_later_steps_and_shares_are_of_live_ranks(tmp_path):
    healthy = read(Case.parse("2x2"), run_directory(tmp_path / "a"), 1.0)
    damaged = read(Case.parse("2x2:3"), run_directory(tmp_path / "b", tokens=69), 1.0)
    assert healthy.tokens_per_s == 200
    assert share(damaged, [healthy]) == pytest.approx(0.69 / 0.75)
    assert share(damaged, [damaged]) is None


def test_a_bit_that_moved_is_seen_and_recoveries_are_told(tmp_path):
    recovery = dict.fromkeys(("detect", "agree", "unblock", "rebuild", "move", "replay"), 0.25)
    recovery |= {"cause": "rank 3 was killed by SIGKILL", "source": "peers"}
    short = {"cause": "rank 3 joined", "detect": 0.0, "agree": 0.25}
    first = read(Case.parse("2x2"), run_directory(tmp_path / "a", recoveries=[recovery, short]), 1.0)
    other = read(Case.parse("1x1"), run_directory(tmp_path / "b", weights="v"), 1.0)
    assert differs(other, first)
    assert not differs(first, first)
    assert first.recoveries[0].startswith("rank 3 was killed by SIGKILL: 1.50 s (detect 0.25")
    assert first.recoveries[1] == "rank 3 joined: 0.25 s (detect 0.00, agree 0.25), no step was made in it"


def test_a_run_that_does_not_end_shows_what_it_has_told_last(tmp_path, monkeypatch, capsys):
    def hangs(command, timeout, **_):
        run_dir = meshes.Path(command[command.index("--run-dir") + 1])
        run_dir.mkdir(parents=True)
        events = [{"time": 100.0 + n, "kind": "loss", "text": f"rank {n} is gone"} for n in range(20)]
        (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert meshes.main(["job.yaml", "2x2", "--limit", "5"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "2x2: did not end within 5 s"
    assert (len(said), said[-1]) == (13, "      +11.0 s loss: rank 19 is gone")
