"""The configuration: one YAML file, one strict model per concern.

`load_config` is the only way in from a file and `dump_yaml` the only way out; a dumped configuration loads to
an equal one. Every value is checked here once, so that no other module asks whether a number is positive.
What depends on the live ranks (more ranks than units, a degree under `min_degree`) belongs to the plan, what
depends on a file's content to the data. An error is one line: key path, value found, what was expected, and
for an unknown key the nearest known one.

Types are strict (no "8" for 8, no 1 for true), except that an integer may stand for a float. YAML 1.1 reads
`3e-4` as a string; the loader here reads it as the number that it is, and refuses a key given twice.
"""

import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, cast, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from ntp import yaml_text
from ntp.elastic_config import ElasticConfig, below
from ntp.errors import ConfigError
from ntp.faults import Fault
from ntp.model_config import ModelConfig, Recompute
from ntp.section import Count, Fraction, Positive, PositiveFloat, Ratio, Section, Timeout

MOST_RANKS = 1 << 17
"""Of a mesh. A plan of so many is shown in seconds, and no machine has more."""


class DataPath(Section):
    """One source; `weight` is its share of the sequences, relative to the other sources."""

    path: Annotated[str, Field(min_length=1)]
    weight: PositiveFloat = 1.0


class DataConfig(Section):
    """Where text comes from. A path wins over `source`; a plain string means one path of weight 1."""

    source: Literal["stdlib"] | None = "stdlib"
    path: tuple[DataPath, ...] | None = None
    tokenizer: Annotated[str, Field(min_length=1)] = "byte"  # "byte" or the path of a tokenizer.json
    held_out: Fraction = 0.0  # share of the documents
    eval_sequences: Positive = 8

    @field_validator("path", mode="before")
    @classmethod
    def _spell_out_paths(cls, value: Any) -> Any:
        if isinstance(value, str):
            return ({"path": value},)
        if isinstance(value, list):
            items = cast("list[Any]", value)
            return tuple({"path": item} if isinstance(item, str) else item for item in items)
        return value

    @model_validator(mode="after")
    def _has_a_source(self) -> Self:
        if self.source is None and not self.path:
            raise ValueError("source=null and no path; give data.path or data.source: stdlib")
        if self.path == ():
            raise ValueError("path=[] names no source")
        return self


class ParallelConfig(Section):
    """The base mesh: dp x tp ranks (TP fastest), then the standbys."""

    dp: Positive = 1
    tp: Positive = 1
    policy: Literal["free", "uniform"] = "free"
    standbys: Count = 0
    min_degree: Positive = 1
    overlap_exchange: bool = True  # exchange gradients behind the backward pass
    exchange: Literal["peer", "collective"] = "peer"  # of cut products; peer: in GPUs' memory, where in reach
    balance: Literal["measured", "degree"] = "measured"  # groups by each degree's speed, or by degree
    ranks_per_gpu: Positive = 1  # more: try failures on fewer GPUs; gloo instead of NCCL, slow, the same bits
    rank_map: tuple[Count, ...] | None = None  # the process rank at each coordinate; null = the same number

    @property
    def world_size(self) -> int:
        """Ranks of the base mesh and its standbys, failed ones included."""
        return self.dp * self.tp + self.standbys

    @model_validator(mode="after")
    def _mesh_has_a_size_that_is_built(self) -> Self:
        if self.world_size > MOST_RANKS:
            raise ValueError(
                f"dp={self.dp} x tp={self.tp} and standbys={self.standbys} are {self.world_size} ranks; "
                f"a mesh has at most {MOST_RANKS}"
            )
        return self

    @model_validator(mode="after")
    def _degree_is_reachable(self) -> Self:
        if self.min_degree > self.tp:
            raise ValueError(f"min_degree={self.min_degree} exceeds tp={self.tp}")
        return self

    @model_validator(mode="after")
    def _map_is_a_permutation(self) -> Self:
        if self.rank_map is None:
            return self
        if len(self.rank_map) != self.world_size:
            raise ValueError(f"rank_map has {len(self.rank_map)} ranks, the mesh has {self.world_size}")
        seen: set[int] = set()
        for rank in self.rank_map:
            if rank >= self.world_size:
                raise ValueError(f"rank_map names rank {rank}, the mesh has 0 to {self.world_size - 1}")
            if rank in seen:
                raise ValueError(f"rank_map names rank {rank} twice")
            seen.add(rank)
        return self


class ScheduleConfig(Section):
    """Learning rate over steps: linear warm-up, then cosine, warm-up-stable-decay, or constant."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: Count = 0
    decay_steps: Count = 0  # length of the last phase of wsd
    min_lr_ratio: Ratio = 0.1  # final over peak learning rate

    @model_validator(mode="after")
    def _decay_fits_the_kind(self) -> Self:
        if (self.kind == "wsd") != (self.decay_steps > 0):
            raise ValueError(
                f"decay_steps={self.decay_steps} with kind={self.kind}; it is for wsd and must be positive"
            )
        return self


class OptimizerConfig(Section):
    """AdamW on float32 masters."""

    lr: PositiveFloat = 3e-4
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    copies: Positive = 2  # replicas that keep each slice of the state (all, where there are fewer)
    max_grad_norm: Annotated[float, Field(ge=0)] | None = 1.0  # null (or 0) = no clipping
    schedule: ScheduleConfig = ScheduleConfig()

    @field_validator("max_grad_norm")
    @classmethod
    def _zero_is_off(cls, value: float | None) -> float | None:
        return value or None


class TrainConfig(Section):
    """The run: its length, its batch and its arithmetic. Batch sizes count sequences."""

    steps: Positive
    seq_len: Positive
    global_batch: Annotated[int, Field(ge=1, le=10**6)]
    micro_batch: Positive = 1
    grad_group: Positive = 1  # microbatches folded left to right into one leaf of the gradient tree
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cuda_graphs: bool = True  # replay the layers without the host, where a GPU computes
    recompute: Recompute = "none"  # in backward rather than kept from forward
    eval_every: Count = 0  # steps between evaluations; 0 = never
    timeout_s: Timeout = 120.0  # of one collective
    profile: tuple[Positive, ...] = ()  # steps of which every rank writes a trace into RUN_DIR/traces
    stop_after: Count | None = None  # end the run here, with a save; the schedule still counts to `steps`

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return self.steps if self.stop_after is None else min(self.steps, self.stop_after)

    @property
    def microbatches(self) -> int:
        """Microbatches of one step, over all replicas."""
        return self.global_batch // self.micro_batch

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        if self.global_batch % self.micro_batch:
            raise ValueError(
                f"global_batch={self.global_batch} is not a multiple of micro_batch={self.micro_batch}"
            )
        return self


class CheckpointConfig(Section):
    """When the state goes to disk, and where: in the run directory, unless `dir` names another place."""

    every: Count = 0  # steps between saves, the last step included; 0 = never
    keep: Count = 3  # how many stay; 0 = all
    dir: Annotated[str, Field(min_length=1)] | None = None


class LogConfig(Section):
    """What the terminal shows; the run directory always gets every step."""

    every: Positive = 1
    level: Literal["debug", "info", "warning", "error"] = "info"
    tensorboard: bool = False  # event files in RUN_DIR/tensorboard
    wandb: Annotated[str, Field(min_length=1)] | None = None  # project to log to
    prometheus_port: Annotated[int, Field(ge=0, lt=65536)] | None = None  # of the leading agent; 0 = any free
    prometheus_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"


class Config(Section):
    """Everything that decides a run."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    elastic: ElasticConfig = ElasticConfig()
    log: LogConfig = LogConfig()
    faults: tuple[Fault, ...] = ()  # for tests and rehearsals, see `ntp.faults`

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if self.train.eval_every and not self.data.held_out:
            raise ValueError(f"train.eval_every={self.train.eval_every} needs data.held_out > 0, found 0.0")
        return self

    @model_validator(mode="after")
    def _faults_can_happen(self) -> Self:
        ranks, steps = self.parallel.world_size, self.train.steps
        for fault in self.faults:
            if fault.place.rank >= ranks or fault.place.step > steps:
                place = f"rank {fault.place.rank}, step {fault.place.step}"
                raise ValueError(
                    f"faults happen to ranks 0 to {ranks - 1} in steps up to {steps}, found {place}"
                )
        return self

    @model_validator(mode="after")
    def _timeouts_nest(self) -> Self:
        for outer in ("step_timeout_s", "checkpoint_timeout_s") if self.elastic.enabled else ():
            below(self.train, "timeout_s", self.elastic, outer, ("train.", "elastic."))
        return self


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads the YAML file at `path`, applies `a.b=c` overrides (values are YAML; the last one wins), checks.

    Raises ConfigError (one line) for a file that is missing or not YAML, and for whatever the models refuse.
    """
    tree = yaml_text.load_mapping(path)
    for override in overrides:
        apply_override(tree, override)
    return parse_config(yaml_text.to_json(tree))


def parse_config(json_text: str) -> Config:
    """Checks a configuration given as JSON text. Raises ConfigError."""
    return parse_as(Config, json_text)


S = TypeVar("S", bound=Section)


def parse_as(root: type[S], json_text: str, yaml_source: str = "") -> S:
    """Checks JSON text against the sections of `root`. Raises ConfigError.

    The error begins with the line of the offending key, where the YAML text that the JSON came from is given.
    """
    try:
        return root.model_validate_json(json_text)
    except ValidationError as error:
        first = _first_of(error)
        line = yaml_text.line_of(yaml_source, first["loc"])
        raise ConfigError(f"line {line}: " * (line > 0) + _explain(error, root)) from None


def dump_yaml(config: Config) -> str:
    """The resolved configuration, defaults included, as YAML that `load_config` reads back unchanged."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Sets one dotted key of `tree` in place, making the mappings on its way. Raises ConfigError."""
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override!r}: expected key.path=value")
    node = tree
    for depth, key in enumerate(keys[:-1], start=1):
        if node.get(key) is None:
            node[key] = {}
        if not isinstance(node[key], dict):
            raise ConfigError(f"--set {override!r}: {'.'.join(keys[:depth])} is {node[key]!r}, not a section")
        node = cast("dict[str, Any]", node[key])
    node[keys[-1]] = yaml_text.load_value(text, f"--set {override!r}")


def _first_of(error: ValidationError) -> ErrorDetails:
    """The error to report: an unknown key first, which is most often the cause of a missing one."""
    return min(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden")


def _explain(error: ValidationError, root: type[BaseModel]) -> str:
    """One line for the first error: key path, expectation, value; and how many more there are."""
    first = _first_of(error)
    path = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        names = [str(part) for part in first["loc"] if isinstance(part, str)]
        nearest = _nearest(names, root)
        return f"unknown key {path}={_short(first['input'])}; the nearest known key is {nearest}{more}"
    if first["type"] == "missing":
        return f"{path}: missing, and it has no default{more}"
    if first["type"] == "value_error":
        return f"{path + ': ' if path else ''}{first['ctx']['error']}{more}"  # pyright: ignore[reportTypedDictNotRequiredAccess]
    wanted = first["msg"].replace("Input should be", "expected")
    wanted = "expected a section (a mapping)" if first["type"] == "model_type" else wanted
    return f"{path}: {wanted}, found {_short(first['input'])}{more}"


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 120 else text[:117] + "..."


def _nearest(names: list[str], root: type[BaseModel]) -> str:
    """The known key closest to an unknown one: the same name elsewhere, then its section, then anywhere."""
    rehearsal = "faults."  # has keys such as `step`, which a user rarely means
    known = [key for key in _known_keys(root) if names[0] == "faults" or not key.startswith(rehearsal)]
    parent, leaf = ".".join(names[:-1]), names[-1]
    same_name = [key for key in known if key.rpartition(".")[2] == leaf]
    if same_name:
        return same_name[0]
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
    close = difflib.get_close_matches(leaf, siblings, n=1)
    if close:
        return siblings[close[0]]
    by_leaf = {key.rpartition(".")[2]: key for key in known}
    return by_leaf[difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.0)[0]]


def _known_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key below `section`, sections themselves included."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in _sections_in(field.annotation):
            yield from _known_keys(inner, f"{prefix}{name}.")


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections_in(part)
