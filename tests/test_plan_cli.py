"""`ntp-plan` and `ntp-launch --rank-map`: what they say, and bad input."""

import json
from pathlib import Path

import pytest
from ntp_launcher import plan_cli, plan_plots
from ntp_launcher.cli import main as launch
from ntp_launcher.plan_cli import main

from tests.studies import ROOT, job, tree, write

TINY = str(ROOT / "configs" / "tiny-cpu.yaml")


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PET_NNODES", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


def code_of(command, argv):
    try:
        return command(argv)
    except SystemExit as stop:
        return stop.code


def refused(command, argv, capsys, *offenders):
    assert code_of(command, argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    for offender in offenders:
        assert offender in said.err


def test_simulate_prints_assumptions_and_tables_and_writes_json_and_plots(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    policies = [{"name": "drop", "degrees": "whole"}, {"name": "free", "degrees": "free", "pack": True}]
    sweep = {"fractions": [0.0, 0.25], "samples": 3}
    simulation = {"days": 5, "seeds": 2, "max_spare_domains": 4}
    path = write(tmp_path / "c.yaml", policies=policies, sweep=sweep, simulation=simulation)
    assert main(["simulate", str(path), "--json", "r.json", "--plots", "plots"]) == 0
    said = capsys.readouterr().out
    for words in ("assumptions", "policy free: degrees 4-1", "GPUs down, most", "spare domains", "25.00%"):
        assert words in said
    result = json.loads((tmp_path / "r.json").read_text())
    assert set(result["policies"]) == {"drop", "free"}
    assert result["study"]["cluster"]["gpus"] == 32
    assert len(result["policies"]["free"]["spare_domains_needed"]) == 2
    assert sorted(each.name for each in (tmp_path / "plots").iterdir()) == [
        "loss.png",
        "spares.png",
        "throughput.png",
    ]


def test_no_width_cuts_a_number_and_a_pipe_has_none(tmp_path, capsys, monkeypatch):
    policies = [{"name": "drop all that is damaged", "degrees": "whole"}, {"name": "free", "degrees": "free"}]
    sweep = {"fractions": [each / 20 for each in range(10)], "samples": 3}
    simulation = {"days": 5, "seeds": 2, "max_spare_domains": 4}
    path = write(tmp_path / "c.yaml", policies=policies, sweep=sweep, simulation=simulation)
    for columns in ("60", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["simulate", str(path)]) == 0
        assert "…" not in capsys.readouterr().out
    monkeypatch.delenv("COLUMNS")
    assert main(["simulate", str(path)]) == 0
    said = capsys.readouterr().out
    assert "│ drop all that is damaged │" in said
    assert "┃ spare domains for no loss ┃" in said


OUTPUTS = [
    ["simulate", "c.yaml", "--json", "nowhere/r.json"],
    ["simulate", "c.yaml", "--json", "."],
    ["simulate", "c.yaml", "--plots", "c.yaml"],
    ["advise", TINY, "--rank-map", "nowhere/map.json"],
]


@pytest.mark.parametrize("argv", OUTPUTS, ids=" ".join)
def test_an_output_that_cannot_be_written_is_told_before_the_work(argv, tmp_path, capsys, monkeypatch):
    write(tmp_path / "c.yaml")
    for work in ("run", "advise"):
        monkeypatch.setattr(plan_cli, work, None)
    refused(main, argv, capsys, argv[-1])


def test_plots_without_matplotlib_are_refused_before_the_work(tmp_path, capsys, monkeypatch):
    write(tmp_path / "c.yaml")
    monkeypatch.setattr(plan_cli, "run", None)
    monkeypatch.setattr(plan_plots, "find_spec", lambda name: None)
    refused(main, ["simulate", "c.yaml", "--plots", "plots"], capsys, "matplotlib", "pip install")
    assert not (tmp_path / "plots").exists()


def test_equal_studies_give_equal_results(tmp_path):
    path = write(tmp_path / "c.yaml")
    for name in ("a.json", "b.json"):
        assert main(["simulate", str(path), "--json", name]) == 0
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


def test_a_trace_is_one_history(tmp_path):
    (tmp_path / "t.csv").write_text("time,domain,gpu,event\n0,0,0,fail\n120,0,0,repair\n")
    path = write(tmp_path / "c.yaml", failures={"trace": "t.csv"})
    assert main(["simulate", str(path), "--json", "r.json"]) == 0
    outcome = json.loads((tmp_path / "r.json").read_text())["policies"]["drop"]
    assert outcome["throughput"]["mean"] == pytest.approx(1 - 0.25 / 2)
    assert outcome["whole"]["mean"] == pytest.approx(0.5)


def test_recovery_costs_time_and_never_more_than_there_is(tmp_path):
    (tmp_path / "t.csv").write_text("time,domain,gpu,event\n24,0,0,fail\n24.5,0,1,fail\n48,0,0,repair\n")
    recovery = {"failure_s": 3600, "lost_work_s": 0, "repair_s": 7200}
    path = write(tmp_path / "c.yaml", failures={"trace": "t.csv"}, recovery=recovery)
    assert main(["simulate", str(path), "--json", "r.json"]) == 0
    outcome = json.loads((tmp_path / "r.json").read_text())["policies"]["drop"]
    assert outcome["recovering"]["mean"] == pytest.approx((0.5 + 1 + 2) / 240)


@pytest.mark.parametrize("name", ["cluster-paper-32k.yaml", "cluster-h100.yaml"])
def test_the_example_clusters_run(name):
    options = ["simulation.seeds=1", "simulation.days=3", "simulation.max_spare_domains=0", "sweep=null"]
    assert main(["simulate", str(ROOT / "configs" / name), *[w for o in options for w in ("--set", o)]]) == 0


def test_predict_shows_a_step_in_parts(tmp_path, capsys):
    assert main(["predict", TINY, "--failed", "3"]) == 0
    said = capsys.readouterr().out
    for words in ("TFLOP/s", "degree", "pointwise", "exchange over NVLink", "update"):
        assert words in said
    assert main(["predict", TINY, "--domain-size", "4"]) == 0
    assert "exchange over the network" in capsys.readouterr().out
    (tmp_path / "step.yaml").write_text("times: proportional\n")
    refused(main, ["predict", TINY, "--step", "step.yaml"], capsys, "proportional", "analytic")


BAD_STUDIES = [
    ({"cluster": {"gpus": 33, "domain_size": 8}}, ["line 2", "cluster.gpus", "33"]),
    ({"cluster": {"gpus": 64, "domain_size": 8}}, ["line 2", "64 GPUs", "= 32"]),
    ({"cluster": {"gpus": 36, "domain_size": 6}}, ["job.tp", "4 does not divide", "6"]),
    ({"cluster": {"gpus": 0, "domain_size": 8}}, ["line 2", "cluster.gpus", "0"]),
    ({"cluster": {"gpus": 32, "domain_sise": 8}}, ["line 3", "domain_sise", "domain_size"]),
    ({"cluster": {"gpus": "many", "domain_size": 8}}, ["line 2", "many"]),
    ({"cluster": {"gpus": 1 << 30, "domain_size": 8}}, ["line 2", "1073741824 is over"]),
    ({"cluster": {"gpus": 32, "domain_size": 8, "spare_domains": 5}}, ["cluster", "5 spare domains"]),
    (
        {"failures": {"kinds": [{"name": "a", "per_gpu_hour": 1e9, "repair_hours": [1]}]}},
        ["failures.kinds.0.per_gpu_hour", "outages"],
    ),
    ({"job": job(pp=8)}, ["cluster.gpus", "pp 8"]),
    ({"job": job(dp=1, pp=8)}, ["job.pp", "8 stages for 4 layers"]),
    (
        {"job": job(dp=1, tp=128, pp=1), "cluster": {"gpus": 128, "domain_size": 128}},
        ["job.tp", "64 units"],
    ),
    ({"job": job(min_degree=5)}, ["job.min_degree", "5"]),
    ({"job": job(batch={"seq_len": 1, "global_batch": 3})}, ["job.batch.global_batch", "3"]),
    ({"job": job(batch={"seq_len": 1, "global_batch": 9})}, ["job.batch.global_batch", "9"]),
    ({"job": job(batch={"seq_len": 1, "global_batch": 8, "micro_batch": 3})}, ["micro_batch=3"]),
    ({"failures": {}}, ["failures", "trace=None"]),
    ({"failures": {"trace": "t.csv", "kinds": tree()["failures"]["kinds"]}}, ["t.csv"]),
    ({"failures": {"trace": "nowhere.csv"}}, ["nowhere.csv"]),
    (
        {"failures": {"kinds": [{"name": "a", "per_gpu_hour": -1, "repair_hours": [1]}]}},
        ["per_gpu_hour", "-1"],
    ),
    ({"failures": {"kinds": [{"name": "a", "per_gpu_hour": 1, "repair_hours": []}]}}, ["repair_hours"]),
    (
        {"failures": {"kinds": [{"name": "a", "per_gpu_hour": 1, "blast_radius": 3, "repair_hours": [1]}]}},
        ["blast_radius", "3"],
    ),
    ({"policies": []}, ["policies"]),
    ({"policies": [{"name": "a", "degrees": "all"}]}, ["policies.0.degrees", "all"]),
    ({"policies": [{"name": "a", "degrees": [9]}]}, ["policies.0", "degree 9"]),
    ({"policies": [{"name": "a", "degrees": "free"}] * 2}, ["policies.1.name", "'a'"]),
    ({"policies": [{"name": "a", "degrees": "free", "boost": {"speed": {3: 0.5}}}]}, ["0.5"]),
    ({"step": {"times": "table"}}, ["table"]),
    ({"step": {"times": "analytic", "gpu": {"memory_gib": 1e-6}}}, ["tp 4 cannot run", "1e-06"]),
    ({"sweep": {"fractions": [1.5]}}, ["sweep.fractions", "1.5"]),
    ({"simulation": {"days": 0}}, ["simulation.days", "0"]),
]


@pytest.mark.parametrize(("sections", "offenders"), BAD_STUDIES, ids=[each[1][-1] for each in BAD_STUDIES])
def test_an_impossible_cluster_is_refused_with_the_value(sections, offenders, tmp_path, capsys):
    path = write(tmp_path / "c.yaml", **sections)
    refused(main, ["simulate", str(path)], capsys, *offenders)


BAD_COMMANDS = [
    ["simulate", "nowhere.yaml"],
    ["simulate", "c.yaml", "--set", "cluster"],
    ["simulate", "c.yaml", "--set", "cluster.gpus=31"],
    ["simulate", "c.yaml", "--json", "nowhere/r.json"],
    ["advise", TINY, "--failed", "8"],
    ["advise", TINY, "--domain-size", "0"],
    ["advise", TINY, "--step", "nowhere.yaml"],
    ["advise", TINY, "--failed", "0,1,2,3,4,5,6,7"],
    ["advise", TINY, "--rank-map", "nowhere/map.json"],
    ["advice"],
]


@pytest.mark.parametrize("argv", BAD_COMMANDS, ids=" ".join)
def test_a_bad_command_exits_with_2_and_one_line(argv, tmp_path, capsys):
    write(tmp_path / "c.yaml")
    assert code_of(main, argv) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_advice_is_a_rank_map_that_the_launcher_takes(tmp_path, capsys):
    options = ["--set", "parallel.dp=4", "--set", "train.global_batch=7"]
    argv = ["advise", TINY, *options, "--failed", "3,5", "--domain-size", "8", "--rank-map", "map.json"]
    (tmp_path / "step.yaml").write_text("times: proportional\n")
    assert main([*argv, "--step", "step.yaml"]) == 0
    said = capsys.readouterr().out
    command = said.splitlines()[-1].split()
    assert command[0] == "ntp-launch"
    assert sorted(json.loads((tmp_path / "map.json").read_text())) == list(range(16))
    assert launch([*command[1:], "--dry-run"]) == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert [row[1] for row in rows if len(row) > 3 and row[0].isdigit()] == ["4", "2", "4", "4"]


BAD_MAPS = [
    ("[0, 1, 2, 3, 4, 5, 6]", "7 ranks"),
    ("[0, 1, 2, 3, 4, 5, 6, 6]", "rank 6 twice"),
    ("[0, 1, 2, 3, 4, 5, 6, 9]", "rank 9"),
    ("[0, 1, 2, 3, 4, 5, 6, -1]", "-1"),
    ("[0, 1, 2, 3, 4, 5, 6, true]", "True"),
    ('{"0": 1}', "expected a list"),
    ("[0, 1", "not JSON"),
]


@pytest.mark.parametrize(("text", "offender"), BAD_MAPS, ids=[offender for _, offender in BAD_MAPS])
def test_a_bad_rank_map_is_refused(text, offender, tmp_path, capsys):
    (tmp_path / "map.json").write_text(text)
    refused(launch, [TINY, "--rank-map", "map.json", "--dry-run"], capsys, offender)


def test_a_rank_map_that_cannot_be_read_is_named(capsys):
    refused(launch, [TINY, "--rank-map", "nowhere.json", "--dry-run"], capsys, "nowhere.json")
