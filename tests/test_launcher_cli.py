"""The command line: dry runs, and bad input that ends before anything starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ntp_launcher.cli import main

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "configs" / "tiny-cpu.yaml")


@pytest.fixture(autouse=True)
def _no_torchrun_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PET_NNODES", raising=False)
    monkeypatch.chdir(tmp_path)


def test_a_dry_run_shows_config_and_plan_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([TINY, "--failed", "3", "--set", "train.steps=7", "--dry-run"]) == 0
    said = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines()]
    assert ["train.steps", "7"] in rows
    assert ["0", "3", "0 1 2", "2 1 1", "4 4 4", "5 6 6", "3 (0-2)"] in rows
    assert ["1", "4", "4 5 6 7", "1 1 1 1", "3 3 3 3", "4 4 4 5", "5 (3-7)"] in rows
    assert "failed ranks: 3" in said
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_tells_of_standbys_and_dropped_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "parallel.standbys=1", "--set", "parallel.min_degree=3", "--failed", "0,1,8"]
    assert main([TINY, *options, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "standbys: 2 3" in said
    assert "replica 0 is dropped" in said
    assert "6 processes, 4 of them with a shard" in said


def test_a_dry_run_needs_no_torch() -> None:
    code = (
        "import sys; sys.path[:0] = ['.', 'kernels', 'launcher']; from ntp_launcher.cli import main; "
        f"assert main([{TINY!r}, '--dry-run']) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


BAD_INPUT = [
    (["--failed", "8"], "'8'"),
    (["--failed", "3", "--failed", "3"], "'3'"),
    (["--failed", "dp=0/tp=x"], "'dp=0/tp=x'"),
    (["--failed", "@nowhere"], "@nowhere"),
    (["--failed", "0,1,2,3,4,5,6,7"], "0, 1, 2, 3, 4, 5, 6, 7"),
    (["--failed", "0,4", "--set", "parallel.min_degree=4"], "[0, 4]"),
    (["--set", "train.stpes=3"], "train.stpes"),
    (["--set", "train.steps=three"], "three"),
    (["--set", "train.steps"], "'train.steps'"),
    (["--set", "parallel.tp=50"], "50"),
    (["--set", "data.path=nowhere.txt"], "nowhere.txt"),
    (["--set", "data.path=empty.txt"], "empty.txt"),
    (["--set", "data.path=short.txt"], "short.txt"),
    (["--set", "data.path=[short.jsonl]"], "short.jsonl"),
    (["--set", "data.tokenizer=nowhere.json"], "nowhere.json"),
    (["--set", "data.tokenizer=bad.json"], "bad.json"),
    (["--set", "data.tokenizer=wide.json"], "999"),
    (["--set", "model.vocab_size=200"], "200"),
    (["--nproc-per-node", "3"], "--nproc-per-node 3"),
    (["--nnodes", "2"], "--nnodes 2"),
    (["--rdzv-backend", "carrier-pigeon"], "carrier-pigeon"),
    (["--rdzv-backend", "carrier-pigeon", "--rdzv-endpoint", "localhost:0"], "carrier-pigeon"),
    (["--rdzv_endpoint", "host:port"], "host:port"),
    (["--run-dir", "empty.txt/run"], "empty.txt/run"),
    (["--run-dir", ""], "--run-dir/--run_dir: expected a path, found ''"),
    (["--run-dir", "empty.txt"], "'empty.txt' is a file, expected a folder"),
    (["--run-dir", "/dev/null"], "'/dev/null' is a file, expected a folder"),
    (["--log-dir", ""], "--log-dir/--log_dir: expected a path, found ''"),
    (["--log-dir", "empty.txt"], "'empty.txt' is a file, expected a folder"),
    (["--rank-map", ""], "--rank-map/--rank_map: expected a path, found ''"),
    (["--failed", "@"], "'@'"),
    (["--fialed", "3"], "--fialed"),
    (["--strict"], "--strict"),
    (["--device-memory", "80GiB"], "--device-memory"),
]


@pytest.mark.parametrize(
    ("options", "offender"), BAD_INPUT, ids=[" ".join(options) for options, _ in BAD_INPUT]
)
def test_bad_input_exits_with_2_and_one_line_and_starts_nothing(
    options: list[str], offender: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "short.jsonl").write_text('{"text": "too short"}\n')
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "wide.json").write_text(json.dumps(tokenizer_of(999)))
    assert exit_code([TINY, *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert offender in said.err
    assert not (tmp_path / "runs").exists()


def test_an_empty_file_of_failed_ranks_means_none(tmp_path: Path) -> None:
    (tmp_path / "failed").touch()
    assert main([TINY, "--failed", "@failed", "--dry-run"]) == 0


@pytest.mark.parametrize("config", ["nowhere.yaml", "broken.yaml", "."])
def test_a_config_that_cannot_be_read_is_named(
    config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "broken.yaml").write_text("train: {")
    assert exit_code([config]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert config in said


def test_a_config_without_a_name_is_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code([""]) == 2
    assert capsys.readouterr().err == "ntp-launch: error: argument CONFIG.yaml: expected a path, found ''\n"


def exit_code(argv: list[str]) -> int | str | None:
    """What the process would exit with. The worker module does not exist: a start would end with 1."""
    try:
        return main(argv, worker_module="no_such_worker")
    except SystemExit as stop:
        return stop.code


def tokenizer_of(size: int) -> dict[str, object]:
    """The content of a `tokenizer.json` with `size` words."""
    words = {f"w{index}": index for index in range(size - 1)} | {"<|endoftext|>": size - 1}
    return {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
        **dict.fromkeys(
            ["truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"]
        ),
    }
