"""`--resume` through the launcher: what it refuses before anything is touched, and what is done already."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from ntp_launcher.agent import MeshAgent
from ntp_launcher.cli import build_parser, main
from ntp_launcher.flags import LaunchError
from ntp_launcher.job import Job, describe_job, previous_run
from ntp_launcher.resumption import check_resumption, take_over

from ntp.checkpoint.manifest import read_manifest
from ntp.config import dump_yaml, load_config
from ntp.plan import make_plan
from tests.agents import Agents
from tests.checkpoints import flip

ROOT = Path(__file__).parent.parent
CONFIG = str(ROOT / "configs" / "tiny-cpu.yaml")
SHORT = ("train.steps=4", "train.global_batch=4", "train.seq_len=16", "checkpoint.every=2")
MESH = ("parallel.dp=1", "parallel.tp=2")


def options(run_dir, *settings):
    values = [part for setting in (*SHORT, *MESH, *settings) for part in ("--set", setting)]
    return [CONFIG, "--run-dir", str(run_dir), "--quiet", *values]


def launch(run_dir, *more, settings=()):
    """The exit code, stdout and stderr of a run in processes of its own."""
    path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "launcher"))
    command = [sys.executable, "-m", "ntp_launcher", *options(run_dir, *settings), *more]
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps with checkpoints of the second and the last."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    code, out, err = launch(run_dir)
    assert code == 0, out + err
    return run_dir


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def job_of(args):
    config = load_config(args.config, args.set)
    return Job(config, make_plan(config), args.run_dir, {}, resume=args.resume)


def contents(run_dir):
    files = [path for path in sorted(run_dir.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in files}


@contextmanager
def nothing_changes(run_dir):
    before = contents(run_dir)
    yield
    assert contents(run_dir) == before


def checkpoint(run_dir, step):
    return run_dir / "checkpoints" / f"step-{step:08d}"


def lose_a_piece(run_dir, *steps):
    for step in steps:
        (checkpoint(run_dir, step) / "pieces-00000.safetensors").unlink()


REFUSALS = {
    "another model": (
        (),
        ("--set", "model.num_hidden_layers=3"),
        "is of another model: model.num_hidden_layers",
    ),
    "damage and --strict": ((4,), ("--strict",), "step-00000004' is damaged (pieces-00000"),
    "no sound one": ((2, 4), (), "no sound checkpoint is left"),
    "an end before it": ((), ("--set", "train.steps=3"), "the checkpoint is of step 4"),
    "an end before it, by stop_after": ((), ("--set", "train.stop_after=1"), "end the run after step 1"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_cannot_be_resumed_is_refused_before_anything_is_touched(copy, capsys, refusal):
    damaged, more, said = REFUSALS[refusal]
    lose_a_piece(copy, *damaged)
    with nothing_changes(copy):
        assert main([*options(copy), "--resume", "auto", *more]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert said in told.err


def test_a_finished_run_is_not_run_again(copy, capsys):
    with nothing_changes(copy):
        assert main([*options(copy), "--resume", "auto"]) == 0
    assert capsys.readouterr().out == f"ntp-launch: done already, up to step 4: results in {copy}\n"


def test_damage_that_only_values_show_leaves_the_earlier_results_and_is_no_loss(copy):
    piece = read_manifest(checkpoint(copy, 4)).pieces[5]
    flip(checkpoint(copy, 4) / piece.file, piece.offset)
    told = ("summary.json", "resolved.yaml", "plan.json", "metrics.jsonl")
    before = {name: (copy / name).read_bytes() for name in told}
    code, out, err = launch(copy, "--resume", "auto", "--strict", settings=("train.steps=6",))
    assert code == 2, out + err
    assert "--strict takes no older one" in err.splitlines()[-1]
    assert "Traceback" not in out + err
    assert {name: (copy / name).read_bytes() for name in told} == before
    events = [json.loads(line) for line in (copy / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events[-2:]] == ["start", "end"]


def test_a_run_that_ended_before_its_summary_gets_one_with_the_loss_of_its_last_step(finished, copy):
    (copy / "summary.json").unlink()
    assert launch(copy, "--resume", "auto")[0] == 0
    was, now = (json.loads((run / "summary.json").read_text()) for run in (finished, copy))
    for key in ("steps", "loss", "loss_bits", "weights_sha256", "state_sha256"):
        assert was[key] == now[key]


def test_without_checkpoints_a_finished_run_is_done_if_it_was_to_save_none(copy, capsys):
    shutil.rmtree(copy / "checkpoints")
    with nothing_changes(copy):
        assert main([*options(copy, "checkpoint.every=0"), "--resume", "auto"]) == 0
    assert "done already" in capsys.readouterr().out
    job = job_of(build_parser({}).parse_args([*options(copy), "--resume", "auto"]))
    (said,) = take_over(job, copy)
    assert "begins again at step 0" in said


def test_a_run_that_begins_elsewhere_knows_it_before_any_worker_does(finished, tmp_path):
    source = checkpoint(finished, 2)
    begins = job_of(build_parser({}).parse_args([*options(tmp_path / "run"), "--resume", str(source)]))
    assert [*take_over(begins, tmp_path / "run")] == []
    goes_on = job_of(build_parser({}).parse_args([*options(tmp_path / "run"), "--resume", "auto"]))
    assert check_resumption(goes_on, tmp_path / "run") == source


def dangling(run_dir):
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "checkpoints").symlink_to(run_dir / "a disk that is not there")


def circular(run_dir):
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "checkpoints").symlink_to("checkpoints")


def a_file(run_dir):
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "checkpoints").touch()


def garbage(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")


def not_text(run_dir):
    (run_dir / "metrics.jsonl").write_bytes(b"\xff\xfe\n")


DAMAGE = {
    dangling: "checkpoints': No such file",
    circular: "checkpoints': Too many levels",
    a_file: "checkpoints': Not a directory",
    garbage: "metrics.jsonl' is not what a run writes: line 5",
    not_text: "metrics.jsonl': it is not UTF-8",
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("what", ["auto", "4"])
def test_what_stands_in_the_way_is_named_and_stays_as_it_is(copy, capsys, damage, what):
    damage(copy)
    (copy / "summary.json").unlink()
    with nothing_changes(copy):
        assert main([*options(copy), "--resume", what, "--set", "train.steps=6"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert DAMAGE[damage] in told


@pytest.mark.parametrize("what", ["9" * 5000, "\u0664", "x" * 300, "a\0b", "nowhere"])
def test_what_names_no_checkpoint_is_refused_in_a_line(copy, capsys, what):
    with nothing_changes(copy):
        assert main([*options(copy), "--resume", what]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_new_run_takes_earlier_checkpoints_away_before_anything_of_it_exists(copy, monkeypatch):
    """It is stopped at the first chance, and what it is resumed from must not be the other run's."""

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("ntp_launcher.agent.describe_job", stopped)
    with pytest.raises(KeyboardInterrupt):
        launch_here(copy)
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["earlier-1"]
    assert not (copy / "metrics.jsonl").exists()


def launch_here(run_dir):
    job = job_of(build_parser({}).parse_args([*options(run_dir), "--set", "train.seed=1"]))
    agent = object.__new__(MeshAgent)
    agent.run_dir, agent._job, agent._attempt, agent._locked = run_dir, job, 0, ExitStack()
    with agent._locked:
        agent._take_run_dir()


def test_a_copy_of_a_checkpoint_under_another_name_is_gone_on_with(finished, copy):
    checkpoint(copy, 2).rename(copy / "checkpoints" / "best")
    code, out, err = launch(copy, "--resume", str(copy / "checkpoints" / "best"))
    assert code == 0, out + err
    was, now = (json.loads((run / "summary.json").read_text()) for run in (finished, copy))
    assert was["state_sha256"] == now["state_sha256"]
    assert (copy / "checkpoints" / "latest").read_text() == "step-00000004\n"


def test_a_full_disk_leaves_the_earlier_description(copy, monkeypatch):
    job = job_of(build_parser({}).parse_args([*options(copy), "--set", "train.seed=1"]))
    write_text, written = Path.write_text, []

    def full(path, *arguments, **named):
        if written:
            raise OSError(28, "No space left on device", str(path))
        written.append(path)
        return write_text(path, *arguments, **named)

    monkeypatch.setattr(Path, "write_text", full)
    with nothing_changes(copy), pytest.raises(LaunchError, match="No space left"):
        describe_job(job, copy)


def test_auto_passes_over_a_run_whose_checkpoints_cannot_be_read(finished, tmp_path):
    for name in ("older", "newer"):
        shutil.copytree(finished, tmp_path / name)
    config = load_config(tmp_path / "older" / "resolved.yaml")
    assert previous_run(config, tmp_path) == tmp_path / "older"  # by name
    nowhere = config.checkpoint.model_copy(update={"dir": "x" * 300})
    unreadable = config.model_copy(update={"checkpoint": nowhere})
    (tmp_path / "older" / "resolved.yaml").write_text(dump_yaml(unreadable))
    assert previous_run(config, tmp_path) == tmp_path / "newer"


def test_every_node_hears_what_cannot_be_resumed_or_is_done(copy, tmp_path):
    values = [part for setting in (*SHORT, *MESH) for part in ("--set", setting)]
    for more, code, said in (
        (["--set", "train.steps=3"], 2, "the checkpoint is of step 4"),
        ([], 0, "done already"),
    ):
        directory = tmp_path / said.split()[0]
        directory.mkdir()
        copy.rename(directory / "run")
        agents = Agents(directory, [CONFIG, *values, "--resume", "auto", *more])
        with nothing_changes(directory / "run"):
            started = [agents.start(node) for node in (0, 1)]
            assert [process.wait(120) for process in started] == [code, code]
        if code:
            assert all(said in agents.said(number) for number in (0, 1))
        (directory / "run").rename(copy)
        agents.close()
