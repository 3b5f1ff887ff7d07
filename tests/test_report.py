"""The report page and the doctor: what they say, and that the page needs nothing from outside."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ntp_launcher import doctor_cli, report_cli
from ntp_launcher.doctor import disk_verdict, folder_verdict, torch_verdict
from ntp_launcher.svg import WIDTH, Series, Span, lines, stacked, timeline

from ntp.config import dump_yaml, load_config
from tests.test_progress_view import TINY, line


def run(folder: Path, loss: bool, bits: str = "40") -> str:
    folder.mkdir()
    (folder / "resolved.yaml").write_text(dump_yaml(load_config(TINY)))
    steps = [{**line(step, int(loss and step > 5)), "loss_bits": bits} for step in range(1, 11)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    events: list[dict[str, object]] = [{"time": 1000.0, "kind": "start", "generation": 0, "failed": []}]
    if loss:
        events.append({"time": 1000.05, "kind": "loss", "generation": 1, "failed": [3]})
    told = [{"text": "rank 3 was <killed>", **event} for event in events]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))
    return str(folder)


def test_one_page_holds_everything_and_asks_for_nothing(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", loss=True), run(tmp_path / "b", loss=False)
    target = tmp_path / "page.html"
    assert report_cli.main([a, b, "-o", str(target)]) == 0
    page = target.read_text()
    assert not re.search(r"(src|href)=|url\(|@import|http", page)
    assert "rank 3 was &lt;killed&gt;" in page
    assert "<killed>" not in page
    assert "The losses of all 10 common steps are the same bits." in page
    assert page.count("<svg") == 6  # four plots, a mesh each; nobody has measured a recovery
    assert "rank 3 lost, generation 1" in page


def test_losses_that_differ_are_told_by_their_first_step(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", loss=False), run(tmp_path / "b", loss=False, bits="41")
    assert report_cli.main([a, b]) == 0
    assert "The losses differ from step 1 on." in (tmp_path / "a" / "report.html").read_text()


def test_what_is_no_run_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_cli.main([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    empty = run(tmp_path / "a", loss=False)
    (tmp_path / "a" / "metrics.jsonl").write_text("")
    assert report_cli.main([empty]) == 2
    assert "no committed step" in capsys.readouterr().err


def test_a_page_does_not_replace_what_a_run_has_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = run(tmp_path / "a", loss=False)
    metrics = tmp_path / "a" / "metrics.jsonl"
    before = metrics.read_text()
    assert report_cli.main([one, "-o", str(metrics)]) == 2
    assert "is a file of the run" in capsys.readouterr().err
    assert metrics.read_text() == before


def test_a_long_series_keeps_its_spikes() -> None:
    points = [(float(x), 100.0 if x == 7777 else 1.0) for x in range(100000)]
    assert lines([Series("a", points, "s0")], "step").count(",") < 700
    assert "100" in lines([Series("a", points, "s0")], "step")


def test_no_label_leaves_its_chart_or_meets_another() -> None:
    """Letters of 12 px are at most 7 wide on the mean; what a phone shows is this, a little smaller."""
    charts = [
        lines([Series("a", [(0, 3.25e8), (99999, 3.35e8)], "s0")], "step"),
        stacked([("20261128-042529-541"[-13:], [("a", 123.4, "f0"), ("b", 0.2, "f1")])], "s"),
        timeline([f"rank {rank}" for rank in range(504, 512)], [Span(0, 0, 4321.0, "up", "")], "seconds"),
    ]
    for chart in charts:
        labels = [label_span(*found) for found in re.findall(r"<text ([^>]*)>([^<]*)<", chart)]
        assert len(labels) > 1
        for y, start, stop in labels:
            assert start >= 0, chart
            assert stop <= WIDTH, chart
            assert not any(y == b and max(start, x) < min(stop, z) for b, x, z in labels if x != start)


def label_span(attributes: str, text: str) -> tuple[float, float, float]:
    """Its line, and from where to where it goes."""
    found = dict(re.findall(r'([a-z-]+)="([^"]*)"', attributes))
    x, wide = float(found["x"]), 7.0 * len(text)
    start = {"end": x - wide, "middle": x - wide / 2}.get(found.get("text-anchor", ""), x)
    return float(found["y"]), start, start + wide


def test_the_doctor_looks_at_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    doctor_cli.main(["--json", "--run-dir", str(tmp_path / "not" / "yet")])
    assert list(tmp_path.iterdir()) == []
    found = {one["name"]: one for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {"torch", "run directory", "disk", "host memory", "gloo group"} <= found.keys()
    assert "rebuilt in" in found["gloo group"]["found"]
    assert found["torch"]["level"] == "ok"


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("file", "it is a file"),
        ("file/run", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("/proc/run", "No such file or directory"),
    ],
)
def test_the_doctor_says_where_no_run_directory_can_be_made(
    place: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert doctor_cli.main(["--json", "--run-dir", place]) == 1
    found = {one["name"]: one for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found["run directory"]["level"] == "bad"
    assert found["run directory"]["found"] == f"{place!r} cannot be made or written: {reason}"
    assert "--run-dir" in found["run directory"]["advice"]
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_the_doctor_says_where_a_run_directory_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(dir: Path) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    verdict = folder_verdict(str(tmp_path / "new"))
    assert (verdict.level, "Permission denied" in verdict.found) == ("bad", True)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("has_gpu", "expected"),
    [
        (False, "ok kernels: not needed: the torch twins compute on a processor"),
        (True, "bad kernels: triton is absent"),
    ],
)
def test_the_doctor_needs_no_triton(has_gpu: bool, expected: str) -> None:
    code = (
        "import sys, torch; sys.modules['triton'] = None; from ntp_launcher import doctor; "
        f"torch.cuda.is_available = lambda: {has_gpu}; "
        "print(*(f'{one.level} {one.name}: {one.found}' for one in doctor._kernels()))"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True
    )
    assert done.stdout.strip() == expected


def test_the_doctor_says_what_will_not_work_and_what_to_do() -> None:
    old = torch_verdict("2.9.1+cu128")
    assert (old.level, "2.9.1" in old.found, "2.11" in old.advice) == ("bad", True, True)
    assert "pip install" in torch_verdict(None).advice
    assert "checkpoint.keep" in disk_verdict("/", 1 << 30).advice
