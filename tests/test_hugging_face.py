"""Models of the `transformers` library go in and come out again, tensor by tensor."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from ntp_launcher.cli import main
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from ntp.config import dump_yaml
from ntp.data import Batch, datasets_of
from ntp.errors import HuggingFaceError
from ntp.export import byte_tokenizer, export
from ntp.hugging_face import import_weights, model_settings
from ntp.plan import make_plan
from ntp.testing import simulate
from ntp.trainer import Trainer
from tests.checkpoints import SHORT, train
from tests.shapes import LLAMA, QWEN, make_config
from tests.transformers_oracle import build_oracle

ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES = {
    "llama": LLAMA,
    "llama with scaled rope, tied": {**LLAMA, "rope_scaling": ROPE, "tie_word_embeddings": True},
    "qwen3": {**LLAMA, "qk_norm": True, "head_dim": 32, "rms_norm_eps": 1e-6},
    "qwen3, tied": QWEN,
    "qwen2": {**LLAMA, "hidden_size": 128, "qkv_bias": True},
}
MESHES = [({"dp": 1, "tp": 1}, ()), ({"dp": 1, "tp": 3}, ()), ({"dp": 2, "tp": 4}, (3,))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make the folder of a random model once; `shards` cuts it into several files."""
    torch.set_num_threads(1)
    made = {}

    def get(name, shards=False, dtype=torch.float32):
        key = name, shards, dtype
        if key not in made:
            path = made[key] = tmp_path_factory.mktemp("model")
            model = build_oracle(make_config(SHAPES[name]).model).to(dtype)
            model.save_pretrained(path, **({"max_shard_size": "50KB"} if shards else {}))
        return made[key]

    return get


def configuration(name, folder, parallel=None, **train):
    return make_config(
        {**SHAPES[name], "init_from": folder and str(folder)},
        parallel=parallel or {"dp": 1, "tp": 1},
        train={**SHORT, **train},
        optimizer={"lr": 1e-2, "schedule": {"kind": "constant"}},
        checkpoint={"every": 100},
    )


def tokens(count=32):
    ids = torch.randint(0, 272, (count,), generator=torch.Generator().manual_seed(5))
    return Batch(
        ids, ids, torch.zeros(count, dtype=torch.int32), torch.arange(count, dtype=torch.int32), count
    )


def our_logits(config, failed=()):
    config = config.model_copy(update={"train": config.train.model_copy(update={"seq_len": 32})})
    plan, data = make_plan(config, failed), datasets_of(config)

    def body(member):
        trainer = Trainer(config, plan, member.mesh, data, torch.device("cpu"))
        import_weights(Path(config.model.init_from), config.model, trainer.optimizer)
        trainer.publish()
        with torch.no_grad():
            return trainer.model.logits(tokens())

    return simulate(body, plan)[plan.workers[0]]


def their_logits(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(tokens().inputs[None]).logits[0]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("shards", [False, True])
def test_an_imported_model_gives_the_same_logits(folder, name, shards):
    source = folder(name, shards)
    assert (source / "model.safetensors.index.json").exists() is shards
    expected = their_logits(source)
    for parallel, failed in MESHES if shards else MESHES[:1]:
        logits = our_logits(configuration(name, source, parallel), failed)
        assert (logits - expected).abs().max() < 1e-5


def run_and_export(config, tmp_path, failed=()):
    run = train(config, datasets_of(config), tmp_path / "run", failed)
    (tmp_path / "run" / "resolved.yaml").write_text(dump_yaml(config))
    return run, export(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_untouched_import_is_exported_byte_for_byte(folder, tmp_path, name, dtype):
    source = folder(name, dtype=dtype)
    config = configuration(name, source, {"dp": 2, "tp": 4}, stop_after=0)
    _, (step, written) = run_and_export(config, tmp_path, failed=(3,))
    assert (step, written) == (0, str(dtype).removeprefix("torch."))
    ours, theirs = load_file(tmp_path / "out" / "model.safetensors"), load_file(source / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for tensor in ours:
        assert ours[tensor].dtype == theirs[tensor].dtype == dtype
        assert torch.equal(ours[tensor].view(torch.uint8), theirs[tensor].view(torch.uint8)), tensor


@pytest.mark.parametrize("name", SHAPES)
def test_a_trained_model_gives_the_same_logits_in_transformers(folder, tmp_path, name):
    config = configuration(name, folder(name), {"dp": 1, "tp": 3})
    run, _ = run_and_export(config, tmp_path)
    assert run.steps[-1].loss < run.steps[0].loss
    again = configuration(name, tmp_path / "out")
    assert (our_logits(again) - their_logits(tmp_path / "out")).abs().max() < 1e-5
    assert (their_logits(tmp_path / "out") - their_logits(folder(name))).abs().max() > 1e-3


@pytest.mark.parametrize("name", SHAPES)
def test_a_model_trained_from_nothing_is_exported_with_its_tokenizer(tmp_path, name):
    config = configuration(name, None, steps=1)
    run_and_export(config, tmp_path)
    again = configuration(name, tmp_path / "out")
    assert (our_logits(again) - their_logits(tmp_path / "out")).abs().max() < 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "def f(x):\n\treturn 'naïve' # \x00\x7f ẞ €\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == 256


def test_every_byte_is_its_own_token():
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
    for first in range(0, 0x110000, 997):
        text = "".join(chr(c) for c in range(first, first + 3) if not 0xD800 <= c < 0xE000)
        assert tokenizer.encode(text).ids == list(text.encode())


# ---- what does not fit is named


def damaged_copy(source, tmp_path, change=None, **config):
    shutil.copytree(source, tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "config.json").read_text()) | config
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    if change is not None:
        path = tmp_path / "model" / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
    return tmp_path / "model"


REFUSALS = {
    "model_type 'mixtral' is not one of llama, qwen2, qwen3": {"model_type": "mixtral"},
    "architecture LlamaForSequenceClassification is not known": {
        "architectures": ["LlamaForSequenceClassification"]
    },
    "mlp_bias=True is not supported": {"mlp_bias": True},
    "hidden_act='gelu' is not supported": {"hidden_act": "gelu"},
    "rope type 'yarn' is not supported": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
    "model.num_key_value_heads is 4 in the config and 2 in": {"num_key_value_heads": 2},
    "model_type ['llama'] is not one of": {"model_type": ["llama"]},
    "num_attention_heads: Input should be greater than 0": {"num_attention_heads": 0, "head_dim": None},
    "num_attention_heads: Input should be a valid integer": {"num_attention_heads": "8"},
    "hidden_size: Input should be a valid integer": {"hidden_size": None},
    "architectures: Input should be a valid list": {"architectures": "LlamaForCausalLM"},
    "rope_scaling: Input should be a valid dictionary": {"rope_scaling": "yarn"},
    "rope_parameters: Input should be a valid dictionary": {"rope_parameters": [1]},
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_the_trainer_cannot_compute_is_refused_by_name(folder, tmp_path, message):
    source = damaged_copy(folder("llama"), tmp_path, **REFUSALS[message])
    with pytest.raises(HuggingFaceError) as error:
        our_logits(configuration("llama", source))
    assert message in str(error.value)


def widen(tensors):
    tensors["model.norm.weight"] = torch.ones(48)


def quantise(tensors):
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)


WRONG_TENSORS = {
    "misses model.layers.1.mlp.up_proj.weight": lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
    "has, and the model has not, model.layers.0.extra.weight": lambda t: t.update(
        {"model.layers.0.extra.weight": torch.ones(3)}
    ),
    "model.norm.weight has shape [48], expected [32]": widen,
    "model.norm.weight is I8; weights must be": quantise,
}


@pytest.mark.parametrize("message", WRONG_TENSORS)
def test_missing_and_surplus_tensors_are_named(folder, tmp_path, message):
    source = damaged_copy(folder("llama"), tmp_path, WRONG_TENSORS[message])
    with pytest.raises(HuggingFaceError) as error:
        our_logits(configuration("llama", source))
    assert message in str(error.value)


def test_a_folder_that_does_not_fit_is_refused_before_a_run_directory_is_touched(folder, tmp_path, capsys):
    misfit = damaged_copy(folder("llama"), tmp_path, change=widen)
    config, run_dir = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(dump_yaml(configuration("llama", misfit)))
    run_dir.mkdir()
    (run_dir / "summary.json").write_text("{}")
    assert main([str(config), "--run-dir", str(run_dir)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "has shape" in said
    assert [path.name for path in run_dir.iterdir()] == ["summary.json"]


def test_a_head_beside_a_tied_embedding_must_equal_it(folder, tmp_path):
    def copy_head(tensors, offset=0.0):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + offset

    same = damaged_copy(folder("qwen3, tied"), tmp_path / "same", copy_head)
    logits = our_logits(configuration("qwen3, tied", same))
    assert (logits - their_logits(folder("qwen3, tied"))).abs().max() < 1e-5
    other = damaged_copy(folder("qwen3, tied"), tmp_path / "other", lambda tensors: copy_head(tensors, 1.0))
    with pytest.raises(HuggingFaceError, match=r"lm_head.weight .* differs from the embedding"):
        our_logits(configuration("qwen3, tied", other))


def test_a_lost_or_broken_file_is_named(folder, tmp_path):
    source = damaged_copy(folder("llama", shards=True), tmp_path)
    lost = sorted(source.glob("*.safetensors"))[1]
    content = lost.read_bytes()
    lost.write_bytes(content[:100])
    with pytest.raises(HuggingFaceError, match=lost.name):
        our_logits(configuration("llama", source))
    lost.unlink()
    with pytest.raises(HuggingFaceError, match=lost.name):
        our_logits(configuration("llama", source))
    with pytest.raises(HuggingFaceError, match="cannot read"):
        our_logits(configuration("llama", tmp_path / "nowhere"))


@pytest.mark.parametrize("file", [5, None, "weights\0"])
def test_an_index_that_names_no_files_is_refused(folder, tmp_path, file):
    source = damaged_copy(folder("llama", shards=True), tmp_path)
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = file
    index.write_text(json.dumps(content))
    with pytest.raises(HuggingFaceError, match=r"weight_map|null byte"):
        our_logits(configuration("llama", source))


def test_both_spellings_of_the_rope_settings_are_read(tmp_path):
    base = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    base |= {"intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 257}
    old = base | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **ROPE}}
    new = base | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **ROPE}}
    settings = []
    for config in (old, new):
        (tmp_path / "config.json").write_text(json.dumps(config))
        settings.append(model_settings(tmp_path))
    assert settings[0] == settings[1]
    assert settings[0]["rope_scaling"] == ROPE


def test_an_export_overwrites_nothing(folder, tmp_path):
    config = configuration("llama", folder("llama"), stop_after=0)
    run_and_export(config, tmp_path)
    with pytest.raises(HuggingFaceError, match="exists already"):
        export(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_an_export_names_the_file_of_the_first_weights_that_it_cannot_read(folder, tmp_path, name):
    source = damaged_copy(folder("llama"), tmp_path)
    byte_tokenizer().save(str(source / "tokenizer.json"))
    run_and_export(configuration("llama", source, stop_after=0), tmp_path)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    (source / name).unlink()
    (source / name).mkdir()
    with pytest.raises(HuggingFaceError, match=f"cannot read '{source / name}': Is a directory"):
        export(tmp_path / "run", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_an_export_has_the_tokenizer_of_the_run_or_names_it(tmp_path):
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine" / "bytes.json"
    byte_tokenizer().save(str(path))
    config = configuration("llama", None, stop_after=0)
    config = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": str(path)})})
    run_and_export(config, tmp_path)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == path.read_bytes()
    path.unlink()
    with pytest.raises(HuggingFaceError, match=f"cannot read '{path}': No such file"):
        export(tmp_path / "run", tmp_path / "again")


def test_a_large_model_is_exported_in_several_files(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("ntp.export.FILE_BYTES", 60_000)
    config = configuration("llama", folder("llama"), stop_after=0)
    run_and_export(config, tmp_path)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    assert not list((tmp_path / "out").glob("*.part"))
    assert torch.equal(their_logits(tmp_path / "out"), their_logits(folder("llama")))
