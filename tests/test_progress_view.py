"""What people see of a run: the live view at several sizes, events and exporters."""

import io
import json
import urllib.request
from pathlib import Path

import pytest
from ntp_launcher.audience import Audience
from ntp_launcher.events import End
from ntp_launcher.exporters import tagged
from ntp_launcher.failure import failure_report
from ntp_launcher.live import duration, render, sparkline
from ntp_launcher.progress import Happening, Mark, Progress
from ntp_launcher.prometheus import Prometheus, prometheus_text
from ntp_launcher.terminals import JsonLines, Lines, View
from rich.console import Console
from rich.text import Text

from ntp.config import Config, load_config
from ntp.protocol import Generation

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "configs" / "tiny-cpu.yaml")


def config(*changes: str) -> Config:
    return load_config(TINY, ["train.steps=100000", *changes])


def line(step: int, generation: int = 0) -> dict[str, object]:
    phases = {"compute": 0.007, "exchange": 0.002, "vote": 0.0005, "update": 0.0005}
    return {
        "step": step,
        "loss": 5 - step / 100,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 2048,
        "tokens_per_s": 204800.0,
        "step_time_s": 0.01,
        "generation": generation,
        "time": 1000.0 + step / 100,
        "phases_s": phases,
        "memory_bytes": 400 << 20,
    }


def after_a_loss(of: Config) -> Progress:
    progress = Progress(of, 1000.0)
    progress.begin(Generation(0, []))
    for step in range(1, 200):
        progress.committed(line(step))
    progress.opened(Generation(1, [3], cause="rank 3 was killed by SIGKILL"), 1002.0)
    progress.happened(Happening(1002.0, "loss", "rank 3 was killed by SIGKILL; " + "and much more " * 20))
    return progress


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize("mesh", [(2, 4), (64, 8)])
def test_no_line_wraps_and_the_height_is_kept(width: int, unicode: bool, mesh: tuple[int, int]) -> None:
    shape = ["train.global_batch=64", f"parallel.dp={mesh[0]}", f"parallel.tp={mesh[1]}"]
    lines = render(after_a_loss(config(*shape)).snapshot(1002.5), width, 24, unicode)
    view = "\n".join(line.plain for line in lines)
    assert len(lines) <= 24
    assert all(line.cell_len <= width for line in lines)
    assert "RECOVERING 0.5 s" in view
    assert f"{mesh[1] - 1}/{mesh[1]}" in view  # the damaged replica is always among those shown
    assert unicode or view.isascii()


@pytest.mark.parametrize("width", [80, 200])
def test_what_the_terminal_gets_does_not_wrap(width: int) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, height=24, color_system="truecolor")
    view = View(console)
    view.look(lambda: after_a_loss(config("parallel.standbys=2")).snapshot(1002.5))
    view.close()
    drawn = [Text.from_ansi(line) for line in screen.getvalue().splitlines()]
    assert any("RECOVERING 0.5 s" in line.plain for line in drawn)
    assert max(line.cell_len for line in drawn) <= width


def test_the_map_tells_lost_standing_by_and_recovering_apart() -> None:
    of = config("parallel.standbys=2")
    progress = Progress(of, 0.0)
    progress.begin(Generation(0, [1]))
    shown = progress.snapshot(1.0)
    assert shown.replicas[0].marks == (Mark.LIVE,) * 4  # a standby has taken over
    assert sorted(shown.standbys) == [Mark.LIVE, Mark.STANDBY]
    progress.opened(Generation(1, [1, 2, 3, 8]), 2.0)
    progress.coming([2])
    marks = progress.snapshot(2.5).replicas[0].marks
    assert marks == (Mark.RECOVERING, Mark.RECOVERING, Mark.COMING, Mark.LOST)
    progress.committed(line(1, generation=1))
    assert progress.snapshot(3.0).recovering_s is None


def test_capacity_is_averaged_over_time() -> None:
    progress = Progress(config(), 0.0)
    progress.begin(Generation(0, []))
    progress.opened(Generation(1, [3, 7]), 10.0)
    shown = progress.snapshot(20.0)
    assert (shown.capacity, shown.mean_capacity, shown.recoveries) == (0.75, 0.875, 1)


def test_pipes_get_plain_lines_and_programs_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of = config("log.every=2")
    for listener in (Lines(of), JsonLines(of), Lines(of, quiet=True)):
        audience = Audience(of, tmp_path, [listener])
        audience.begin(Generation(0, []))
        audience.committed(line(1))
        audience.committed({**line(2), "notes": ["checkpoint of step 2: 1 MB"]})
        audience.opened(Generation(1, [3], cause="rank 3 was killed by SIGKILL"), 7, 8)
        audience.recovered({"generation": 1, "kind": "loss", "detect": 0.1, "unblock": 0.2})
        audience.close()
    said = capsys.readouterr()
    out = said.out.splitlines()
    assert out[0].startswith("step 2/100000  loss 4.98")
    kinds = [json.loads(text)["kind"] for text in out if text.startswith("{")]
    assert kinds == ["start", "step", "save", "loss", "recovery"]
    assert (
        said.err.splitlines()
        == ["ntp-launch: rank 3 was killed by SIGKILL; generation 1 has 7 of 8 ranks"] * 2
    )
    events = [json.loads(text) for text in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events[:4]] == ["start", "save", "loss", "recovery"]


def test_the_endpoint_serves_the_newest_look() -> None:
    exporter = Prometheus("127.0.0.1", 0)
    try:
        exporter.look(lambda: after_a_loss(config()).snapshot(1003.0))
        with urllib.request.urlopen(exporter.url) as answer:
            text = answer.read().decode()
    finally:
        exporter.close()
    assert "ntp_step 199\n" in text
    assert 'ntp_degree{replica="0"} 3\n' in text
    assert text == prometheus_text(after_a_loss(config()).snapshot(1003.0))


def test_tags_are_torchtitans() -> None:
    tags = tagged(line(1))
    assert {"loss_metrics/global_avg_loss", "grad_norm", "throughput(tps)", "time_metrics/end_to_end(s)"} <= {
        *tags
    }


def test_a_failure_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    for name, text in (
        ("rank1", "old\n"),
        ("rank1.2", "a\n" * 40 + "ValueError: the cause\n"),
        ("rank12", "x"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stderr.log").write_text(text)
    said = failure_report(End(1, "rank 1 exited", rank=1, host="node7", others=(0, 2)), tmp_path)
    lines = said.splitlines()
    assert lines[0] == "first cause: rank 1 on host node7"
    assert lines[-3].endswith("ValueError: the cause")
    assert str(tmp_path / "rank1.2" / "stderr.log") in lines[-2]
    assert "ranks 0, 2" in lines[-1]
    assert len(lines) < 20
    assert failure_report(End(3, "nothing is known"), tmp_path) == ""


def test_small_forms() -> None:
    assert [duration(s) for s in (9, 250, 11520, 273600)] == ["9s", "4m 10s", "3h 12m", "3d 4h"]
    assert sparkline((3.0, 2.0, 1.0, float("nan")), 3) == "█▅▁"
    assert sparkline((1.0,), 3) == ""
