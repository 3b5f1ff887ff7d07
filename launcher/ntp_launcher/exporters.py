"""Metrics for TensorBoard and Weights & Biases, under torchtitan's tags where it has one.

Both packages are optional and imported when they are asked for. `check_exporters` says before there is a run
what will not work, the endpoint of `prometheus` included.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ntp.config import Config, LogConfig
from ntp_launcher.audience import Listener
from ntp_launcher.flags import LaunchError
from ntp_launcher.progress import Happening, Snapshot
from ntp_launcher.prometheus import check_address

_TAGS = {
    "loss": "loss_metrics/global_avg_loss",
    "held_out_loss": "validation_metrics/loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "tokens_per_s": "throughput(tps)",
    "step_time_s": "time_metrics/end_to_end(s)",
    "generation": "ntp/generation",
}
_GIB = 1 << 30


def tagged(line: Mapping[str, Any]) -> dict[str, float]:
    """Tag -> value for a line of `metrics.jsonl`; what is not known is left out."""
    values = {tag: float(line[key]) for key, tag in _TAGS.items() if line.get(key) is not None}
    for name, seconds in line.get("phases_s", {}).items():
        values[f"time_metrics/{name}(s)"] = seconds
    if line.get("memory_bytes"):
        values["memory/max_active(GiB)"] = line["memory_bytes"] / _GIB
    return values


def check_exporters(log: LogConfig) -> None:
    """Raises LaunchError for an exporter that this process could not run: a package, a login, an address."""
    if log.tensorboard:
        _require("tensorboard.summary.writer.event_file_writer", "log.tensorboard=true")
    if log.wandb is not None:
        _log_in(log.wandb, _require("wandb", f"log.wandb={log.wandb}"))
    if log.prometheus_port is not None:
        check_address(log.prometheus_host, log.prometheus_port)


def _require(module: str, setting: str) -> Any:
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ImportError as error:
        advice = f"pip install 'ntp-trainer[{package}]'"
        raise LaunchError(f"{setting} needs {package} ({error}): {advice}") from None


def _log_in(project: str, wandb: Any) -> None:
    """Asks for a key on a terminal; needs none in W&B's offline mode."""
    try:
        wandb.login()
    except wandb.Error as error:
        raise LaunchError(f"log.wandb={project}: {error}") from None


class Sampled(Listener):
    """Writes a step at every look, the newest: all of them where a step takes longer than from look to look.

    An event costs twenty times what all else does for a step, and no chart shows a hundred points a second.
    """

    def __init__(self, config: Config) -> None:
        self._every = config.log.every
        self._line: Mapping[str, Any] | None = None

    def step(self, line: Mapping[str, Any]) -> None:
        """Keeps the line for the next look, where `log.every` asks for it."""
        if line["step"] % self._every == 0:
            self._line = line

    def look(self, snapshot: Callable[[], Snapshot]) -> None:
        """Writes what has come since the last one."""
        line, self._line = self._line, None
        if line is not None:
            self.write(line)

    @abstractmethod
    def write(self, line: Mapping[str, Any]) -> None:
        """Writes the values of one step."""


class TensorBoard(Sampled):
    """Event files in `folder`, one event with all values a step."""

    def __init__(self, config: Config, folder: Path) -> None:
        super().__init__(config)
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))

    def write(self, line: Mapping[str, Any]) -> None:
        """One event, at the time of the step."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in tagged(line).items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=line["time"], step=line["step"], summary=summary))

    def close(self) -> None:
        """Flushes what is in the queue."""
        self._writer.close()


class WeightsAndBiases(Sampled):
    """A run of `project`, named as the run directory. Raises LaunchError where W&B refuses."""

    def __init__(self, config: Config, project: str, run_dir: Path) -> None:
        super().__init__(config)
        import wandb  # pyright: ignore[reportMissingImports]

        try:
            self._run: Any = wandb.init(
                project=project, name=run_dir.name, dir=str(run_dir), config=config.model_dump(mode="json")
            )
        except wandb.Error as error:
            raise LaunchError(f"log.wandb={project}: {error}") from None

    def write(self, line: Mapping[str, Any]) -> None:
        """Hands the values to W&B's own process."""
        self._run.log(tagged(line), step=line["step"])

    def happening(self, happening: Happening) -> None:
        """A lost rank becomes an alert."""
        if happening.kind == "loss":
            self._run.alert(title="rank lost", text=happening.text)

    def close(self) -> None:
        """Waits until everything is sent."""
        self._run.finish()
