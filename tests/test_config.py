"""The configuration: what loads, what is refused and in which words."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from ntp.config import Config, dump_yaml, load_config, parse_config
from ntp.errors import ConfigError

CONFIGS = Path(__file__).parent.parent / "configs"
TINY = CONFIGS / "tiny-cpu.yaml"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*-cpu.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_survives_its_own_dump(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    dumped = tmp_path / "resolved.yaml"
    dumped.write_text(dump_yaml(config))
    assert load_config(dumped) == config
    assert parse_config(config.model_dump_json()) == config


def test_defaults_are_resolved_in_the_dump() -> None:
    dumped = yaml.safe_load(dump_yaml(load_config(TINY)))
    assert dumped["model"]["head_dim"] == 16
    assert dumped["optimizer"]["betas"] == [0.9, 0.95]
    assert dumped["parallel"]["standbys"] == 0


def test_overrides_are_yaml_and_the_last_one_wins() -> None:
    config = load_config(
        TINY,
        [
            "train.steps=7",
            "train.steps=9",
            "optimizer.lr=1e-4",
            "optimizer.weight_decay=0",
            "data.path=[a, {path: b, weight: 3}]",
        ],
    )
    assert config.train.steps == 9
    assert config.optimizer.lr == 1e-4
    assert config.optimizer.weight_decay == 0
    assert config.data.path is not None
    assert [(source.path, source.weight) for source in config.data.path] == [("a", 1.0), ("b", 3.0)]


def test_an_override_opens_a_section_that_the_file_leaves_out() -> None:
    config = load_config(TINY, ["optimizer.schedule={kind: wsd, decay_steps: 5}", "log.every=2"])
    assert (config.optimizer.schedule.kind, config.log.every) == ("wsd", 2)


def test_a_run_may_be_cut_shorter_than_its_warm_up() -> None:
    assert load_config(TINY, ["train.steps=1"]).train.steps == 1


def test_clipping_is_off_for_null_and_for_zero() -> None:
    assert load_config(TINY, ["optimizer.max_grad_norm=null"]).optimizer.max_grad_norm is None
    assert load_config(TINY, ["optimizer.max_grad_norm=0"]).optimizer.max_grad_norm is None


def test_a_config_cannot_be_changed() -> None:
    config = load_config(TINY)
    with pytest.raises(ValidationError):
        config.train.steps = 3


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.stpes=3", ["train.stpes", "train.steps"]),
        ("train.lr=3", ["train.lr", "optimizer.lr"]),
        ("modle.x=3", ["modle", "model"]),
        ("steps=3", ["steps", "train.steps"]),
        ("model.rope_scaling.factr=3", ["model.rope_scaling.factr", "model.rope_scaling.factor"]),
        ("data.path=[{path: b, weigth: 3}]", ["data.path.0.weigth", "data.path.weight"]),
        ("optimizer.schedule.warmup=3", ["optimizer.schedule.warmup", "optimizer.schedule.warmup_steps"]),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(override: str, said: list[str]) -> None:
    message = refusal(override)
    assert all(words in message for words in ["unknown key", *said])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.lr=abc", ["optimizer.lr", '"abc"']),
        ("train.steps=1.5", ["train.steps", "1.5"]),
        ("train.steps=true", ["train.steps", "true"]),
        ("train.steps='20'", ["train.steps", '"20"']),
        ("train.steps=0", ["train.steps", "0"]),
        ("model=3", ["model", "3", "mapping"]),
        ("model.hidden_size=72", ["model.hidden_size", "72"]),
        ("model.head_dim=24", ["model.head_dim", "24"]),
        ("model.num_attention_heads=7", ["hidden_size=128", "num_attention_heads=7"]),
        ("model.num_key_value_heads=3", ["num_attention_heads=8", "num_key_value_heads=3"]),
        ("train.micro_batch=3", ["global_batch=8", "micro_batch=3"]),
        ("train.dtype=fp8", ["train.dtype", "fp8"]),
        ("train.eval_every=5", ["train.eval_every=5", "data.held_out"]),
        ("optimizer.lr=.inf", ["optimizer.lr", "Infinity"]),
        ("optimizer.betas=[0.9,1.5]", ["optimizer.betas", "1.5"]),
        ("optimizer.schedule.kind=wsd", ["decay_steps=0", "wsd"]),
        ("model.rope_scaling={factor: 8}", ["model.rope_scaling.low_freq_factor", "missing"]),
        ("parallel.min_degree=5", ["min_degree=5", "tp=4"]),
        ("data.source=null", ["source=null"]),
        ("data.path=[]", ["path=[]"]),
        ("train", ["'train'"]),
        ("train.=3", ["'train.=3'"]),
        ("train.steps={", ["train.steps={"]),
        ("train.steps.x=3", ["train.steps is 20"]),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_and_itself(override: str, said: list[str]) -> None:
    message = refusal(override)
    assert all(words in message for words in said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"train: {steps: 3", "line 1"),
        (b"train: {steps: 3}\ntrain: {steps: 4}", "'train' given twice"),
        (b"- 1", "sections"),
        (b"", "model"),
        (b"\xff\xfe", "UTF-8"),
        (b"&a [*a]", "sections"),
        (b"a: &a [*a]", "plain tree"),
        (b"? [1, 2]\n: 3", "unhashable"),
        (b"a: 2026-99-99", "month"),
        (b"[" * 5000, "nested too deeply"),
        (b"[" * 60 + b"]" * 60, "sections"),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_one_line(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["/no/such/file.yaml", "/"])
def test_a_file_that_cannot_be_read_is_named(path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        load_config(path)


def test_a_file_without_a_name_is_no_folder() -> None:
    with pytest.raises(ConfigError, match="no config is named"):
        load_config("")


def test_exponents_without_a_point_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "lr.yaml"
    path.write_text(TINY.read_text().replace("lr: 3e-3", "lr: 3E-4\n  eps: 1.e-7"))
    config: Config = load_config(path)
    assert (config.optimizer.lr, config.optimizer.eps) == (3e-4, 1e-7)


def refusal(override: str) -> str:
    """The one line with which the tiny config and this override are refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(TINY, [override])
    assert "\n" not in str(caught.value)
    return str(caught.value)
