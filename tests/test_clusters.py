"""The examples for clusters work: their command lines are run as the scheduler would, with stand-ins for it.

Slurm's `srun` and `scontrol` are small scripts that set what Slurm documents; for Kubeflow Trainer the test
sets the variables of its torch policy. The workers are stand-ins too (`stub_worker`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_launcher_agent import DRIVER, ROOT, TINY, free_port, seen

CLUSTERS = ROOT / "configs" / "clusters"
SLURM = CLUSTERS / "slurm.sbatch"
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NUM_NODES=$SLURM_JOB_NUM_NODES SLURM_STEP_NUM_TASKS=$SLURM_JOB_NUM_NODES
code=0
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do SLURM_NODEID=$node "$@" & done
for task in $(jobs -p); do wait "$task" || code=$?; done
exit "$code"
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == requeue ]]; then touch "requeued-$2"; else printf 'localhost\\nsecond\\n'; fi
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Mapping[str, str]:
    """A folder with the configs, and the environment of a job on two nodes whose programs are stand-ins."""
    programs = tmp_path / "bin"
    programs.mkdir()
    launch = f'#!/usr/bin/env bash\nexec {sys.executable} -c "{DRIVER}" "$@"\n'
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("ntp-launch", launch)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    python_path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "launcher"))
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PET_", "SLURM_"))}
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {**inherited, **job, "PATH": path, "PYTHONPATH": python_path, "PWD": str(tmp_path)}


def run(words: list[str], environ: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        words, cwd=environ["PWD"], env=dict(environ), capture_output=True, text=True, timeout=120, check=False
    )


def sbatch(environ: Mapping[str, str], *options: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """The script as Slurm runs it, on a port that is free here."""
    text = SLURM.read_text().replace(":29400", f":{free_port()}")
    script = Path(environ["PWD"]) / "job.sh"
    script.write_text(text)
    return run(["bash", str(script), TINY, *options], {**environ, **more})


def test_the_slurm_script_parses_and_leaves_survivors_alone() -> None:
    assert subprocess.run(["bash", "-n", str(SLURM)], check=False).returncode == 0
    text = SLURM.read_text()
    for option in ("#SBATCH --no-kill", "--kill-on-bad-exit=0", "#SBATCH --ntasks-per-node=1"):
        assert option in text


def test_the_slurm_script_launches_a_dry_run(cluster: Mapping[str, str]) -> None:
    done = sbatch(cluster, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("8 processes, 8 of them with a shard") == 2


def test_ranks_follow_slurms_nodes(cluster: Mapping[str, str]) -> None:
    done = sbatch(cluster, STUB_COUNT="8")
    run_dir = Path(cluster["PWD"]) / "runs" / "slurm-17"
    assert done.returncode == 0, done.stderr
    environs = {rank: worker["environ"] for rank, worker in seen(run_dir).items()}
    assert sorted(environs) == list(range(8))
    assert {rank: environ["SLURM_NODEID"] for rank, environ in environs.items()} == {
        rank: str(rank // 4) for rank in range(8)
    }
    assert not list(Path(cluster["PWD"]).glob("requeued-*"))


@pytest.mark.parametrize(("code", "requeued"), [("5", True), ("2", False), ("137", True)])
def test_slurm_runs_again_what_can_go_on_alone(code: str, requeued: bool, cluster: Mapping[str, str]) -> None:
    (Path(cluster["PWD"]) / "bin" / "ntp-launch").write_text(f"#!/usr/bin/env bash\nexit {code}\n")
    assert sbatch(cluster).returncode == int(code)
    assert (Path(cluster["PWD"]) / "requeued-17").exists() == requeued
    (Path(cluster["PWD"]) / "requeued-17").unlink(missing_ok=True)
    sbatch(cluster, SLURM_RESTART_COUNT="5")
    assert not (Path(cluster["PWD"]) / "requeued-17").exists()


def kubeflow() -> tuple[dict[str, Any], dict[str, Any]]:
    runtime, job = yaml.safe_load_all((CLUSTERS / "kubeflow.yaml").read_text())
    return runtime, job


def pod_commands() -> Iterator[tuple[list[str], dict[str, str]]]:
    """What Kubeflow's torch policy makes of the job: words and variables of every pod."""
    runtime, job = kubeflow()
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    trainer = job["spec"]["trainer"]
    shared = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": str(free_port()),
    }
    for index in range(trainer["numNodes"]):
        yield [*container["command"], *trainer["args"]], {**shared, "PET_NODE_RANK": str(index)}


def test_the_kubeflow_job_is_of_its_runtime_and_its_pods_are_made_again() -> None:
    runtime, job = kubeflow()
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert runtime["spec"]["mlPolicy"]["torch"] == {}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    pods = replicated["template"]["spec"]
    (rule,) = pods["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [1, 2, 3, 4])
    assert pods["template"]["spec"]["restartPolicy"] == "Never"  # or the policy would not be asked
    assert pods["backoffLimit"] > 0


def test_the_kubeflow_pods_dry_run(cluster: Mapping[str, str]) -> None:
    for words, variables in pod_commands():
        done = run([*words, "--dry-run"], {**cluster, **variables})
        assert done.returncode == 0, done.stderr
        assert "8 processes, 8 of them with a shard" in done.stdout


def test_ranks_follow_the_pods_completion_index(cluster: Mapping[str, str]) -> None:
    run_dir = Path(cluster["PWD"]) / "run"
    pods = [
        subprocess.Popen(
            [*words, "--run-dir", str(run_dir), "--set=train.device=cpu"],
            cwd=cluster["PWD"],
            env={**cluster, **variables, "STUB_COUNT": "8"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for words, variables in reversed(list(pod_commands()))
    ]
    ends = [pod.communicate(timeout=120)[1] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], ends
    environs = {rank: worker["environ"] for rank, worker in seen(run_dir).items()}
    assert json.dumps({rank: e["PET_NODE_RANK"] for rank, e in sorted(environs.items())}) == json.dumps(
        {rank: str(rank // 4) for rank in range(8)}
    )
