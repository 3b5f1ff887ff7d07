"""Wrong invocations: each message is one line that names what was asked, what was found and what to do."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ntp_launcher import agent
from ntp_launcher.cli import main

TINY = str(Path(__file__).parent.parent / "configs" / "tiny-cpu.yaml")

WRONG: list[tuple[list[str], list[str]]] = [
    (["no-such.yaml"], ["no-such.yaml", "No such file"]),
    ([TINY, "--failed", "8"], ["'8'", "out of range", "0 to 7"]),
    ([TINY, "--failed", "3,3"], ["'3'", "twice"]),
    ([TINY, "--failed", "dp=0/tp=9"], ["dp=0/tp=9", "dp=2 x tp=4"]),
    ([TINY, "--failed", "gpu3"], ["gpu3", "dp=0/tp=3"]),
    ([TINY, "--failed", "0,1,2,3,4,5,6,7"], ["all 8 ranks"]),
    ([TINY, "--failed", "@missing.txt"], ["@missing.txt", "No such file"]),
    ([TINY, "--set", "train.step=5"], ["train.step", "train.steps"]),
    ([TINY, "--set", "train.steps"], ["train.steps", "key.path=value"]),
    ([TINY, "--set", "train.steps=five"], ["train.steps", "five", "integer"]),
    ([TINY, "--set", "train.steps=0"], ["train.steps", "0", "1"]),
    ([TINY, "--set", "parallel.tp=64"], ["parallel.tp=64", "units"]),
    ([TINY, "--set", "parallel.min_degree=5"], ["min_degree=5", "tp=4"]),
    ([TINY, "--set", "train.global_batch=7", "--set", "train.micro_batch=2"], ["7", "2", "multiple"]),
    ([TINY, "--set", "data.tokenizer=missing.json"], ["missing.json"]),
    ([TINY, "--set", "model.vocab_size=100"], ["100", "257"]),
    ([TINY, "--set", "train.timeout_s=500"], ["train.timeout_s=500", "elastic.step_timeout_s=180"]),
    ([TINY, "--set", "log.prometheus_port=70000"], ["log.prometheus_port", "70000"]),
    ([TINY, "--set", "faults=[{kill: {rank: 30, step: 7}}]"], ["faults", "30", "0 to 7"]),
    ([TINY, "--nnodes", "2"], ["--nnodes 2", "--rdzv-endpoint"]),
    ([TINY, "--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "a:1"], ["--node-rank 2", "--nnodes 2"]),
    ([TINY, "--set", "train.steps=1" + 23 * "0"], ["train.steps", "less than or equal to 1000000000000"]),
    ([TINY, "--set", "train.global_batch=1000001"], ["train.global_batch", "1000001", "1000000"]),
    ([TINY, "--set", "parallel.dp=100000"], ["dp=100000 x tp=4", "400000 ranks", "at most 131072"]),
    ([TINY, "--set", "parallel.standbys=131065"], ["standbys=131065", "131073 ranks", "at most 131072"]),
    ([TINY, "--set", "model.num_hidden_layers=100000000"], ["model.num_hidden_layers", "10000"]),
    ([TINY, "--set", "elastic.lease_s=1e-9"], ["elastic.lease_s", "1e-09", "equal to 1"]),
    ([TINY, "--set", "elastic.lease_s=1e300"], ["elastic.lease_s", "1e+300"]),
    ([TINY, "--set", "elastic.rejoin_after_s=1e-9"], ["elastic.rejoin_after_s", "1e-09", "0.05"]),
    ([TINY, "--set", "elastic.agree_timeout_s=0.5"], ["elastic.agree_timeout_s", "0.5", "equal to 1"]),
    ([TINY, "--set", "train.timeout_s=1e-9"], ["train.timeout_s", "1e-09", "equal to 1"]),
    ([TINY, "--set", "faults=[{kill: {rank: 3, step: 0}}]"], ["faults.0.kill", "count from 1", "step=0"]),
    ([TINY, "--set", "faults=[{nan: {rank: 3, step: 0}}]"], ["faults.0.nan", "count from 1", "step=0"]),
    (
        [TINY, "--set", "faults=[{stop: {rank: 3, step: 2, phase: startup}}]"],
        ["faults.0.stop", "startup is of step 0", "step=2"],
    ),
    ([TINY, "--nproc-per-node", "99"], ["--nproc-per-node 99", "all 8 ranks"]),
    ([TINY, "--nproc-per-node", "3"], ["--nproc-per-node 3", "8 ranks"]),
    ([TINY, "--device-memory", "80QB"], ["80QB", "80GiB"]),
    ([TINY, "--rank-map", "missing.json"], ["missing.json", "No such file"]),
]


@pytest.mark.parametrize(
    ("arguments", "facts"), WRONG, ids=[" ".join(words[1:]) or "file" for words, _ in WRONG]
)
def test_a_wrong_invocation_is_told_in_one_line_with_its_facts(
    arguments: list[str],
    facts: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--dry-run"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("ntp-launch: ")
    for fact in facts:
        assert fact in line, (fact, line)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ([], ["CONFIG.yaml"]),
        ([TINY, "--log-format", "xml"], ["--log-format", "xml", "json"]),
        ([TINY, "--nnodes", "1:4"], ["--nnodes", "1:4"]),
        ([TINY, "--faild", "3"], ["--faild"]),
    ],
)
def test_a_wrong_option_is_told_the_same_way(
    arguments: list[str], facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(fact in line for fact in facts), line


class _NoLogin:
    """W&B where nobody has logged in."""

    class Error(Exception):
        """As `wandb.Error`."""

    def login(self) -> None:
        raise self.Error("No API key configured.")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def refused(
    settings: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str
) -> str:
    """The one line with which a real start is refused before any rendezvous."""
    monkeypatch.setattr(agent, "launch", lambda *_: pytest.fail("met other nodes"))
    assert main([TINY, *(word for setting in settings for word in ("--set", setting)), *options]) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert said.out == ""
    return line


@pytest.mark.parametrize(
    ("setting", "package"), [("log.tensorboard=true", "tensorboard"), ("log.wandb=tests", "wandb")]
)
def test_an_exporter_that_is_not_installed_is_refused_before_the_rendezvous(
    setting: str, package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    line = refused([setting], capsys, monkeypatch)
    assert setting in line
    assert f"pip install 'ntp-trainer[{package}]'" in line


def test_a_missing_login_is_refused_before_the_rendezvous(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", _NoLogin())
    line = refused(["log.wandb=tests"], capsys, monkeypatch)
    assert "log.wandb=tests" in line
    assert "No API key" in line


def test_an_address_that_cannot_be_had_is_refused_before_the_rendezvous(
    taken_port: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = refused([f"log.prometheus_port={taken_port}"], capsys, monkeypatch)
    assert f"log.prometheus_port={taken_port}" in line
    assert "in use" in line
    line = refused(["log.prometheus_port=0", "log.prometheus_host=203.0.113.1"], capsys, monkeypatch)
    assert "log.prometheus_host=203.0.113.1" in line


def test_a_node_that_cannot_lead_needs_no_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(agent, "launch", lambda *_: (0, "elsewhere"))
    second = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "localhost:1"]
    assert main([TINY, "--set", "log.wandb=tests", *second]) == 0


NOT_HERE: list[tuple[list[str], list[str]]] = [
    (["--resume", "nowhere"], ["--resume 'nowhere'", "auto"]),
    (["--resume", "7", "--run-dir", "empty"], ["step 7", "empty/checkpoints"]),
    (["--set", "model.init_from=nowhere"], ["nowhere"]),
    (["--log-dir", "file/logs"], ["--log-dir 'file/logs'", "Not a directory"]),
    (["--set", "checkpoint.dir=file/a", "--set", "checkpoint.every=1"], ["checkpoint.dir 'file/a'"]),
    (["--set", "data.path=nowhere.txt"], ["nowhere.txt", "No such file"]),
]


@pytest.mark.parametrize(("options", "facts"), NOT_HERE, ids=[" ".join(options) for options, _ in NOT_HERE])
def test_what_this_node_does_not_have_is_told_before_the_rendezvous(
    options: list[str],
    facts: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    line = refused([], capsys, monkeypatch, *options)
    assert all(fact in line for fact in facts), line


def test_a_gpu_that_is_not_there_is_told_before_the_rendezvous(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "train.device=cuda" in refused(["train.device=cuda"], capsys, monkeypatch)
