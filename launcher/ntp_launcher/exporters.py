"""Metrics for other programs: TensorBoard, Weights & Biases, and a Prometheus endpoint.

Tags are torchtitan's where it has one. The first two packages are optional and imported when they are asked
for. The Prometheus endpoint is plain text over HTTP, on loopback unless told otherwise: it shows numbers of
one run and takes no input.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ntp.config import Config
from ntp_launcher.flags import LaunchError
from ntp_launcher.progress import Happening, Snapshot

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


class TensorBoard:
    """Event files, one event with all values a step; `log.every` thins them out."""

    def __init__(self, config: Config, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
            from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError:
            raise LaunchError(
                "log.tensorboard=true needs tensorboard: pip install 'ntp-trainer[tensorboard]'"
            ) from None
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))
        self._every = config.log.every

    def step(self, line: Mapping[str, Any]) -> None:
        if line["step"] % self._every:
            return
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in tagged(line).items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=line["time"], step=line["step"], summary=summary))

    def happening(self, happening: Happening) -> None:
        """TensorBoard shows numbers."""

    def say(self, line: str) -> None:
        """Not for a metric."""

    def look(self, snapshot: Callable[[], Snapshot]) -> None:
        """Written with the steps."""

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project `log.wandb`."""

    def __init__(self, config: Config, project: str, run_dir: Path) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError:
            raise LaunchError(f"log.wandb={project} needs wandb: pip install 'ntp-trainer[wandb]'") from None
        self._run: Any = wandb.init(
            project=project, name=run_dir.name, dir=str(run_dir), config=config.model_dump(mode="json")
        )
        self._every = config.log.every

    def step(self, line: Mapping[str, Any]) -> None:
        if line["step"] % self._every == 0:
            self._run.log(tagged(line), step=line["step"])

    def happening(self, happening: Happening) -> None:
        if happening.kind == "loss":
            self._run.alert(title="rank lost", text=happening.text)

    def say(self, line: str) -> None:
        """Not for a metric."""

    def look(self, snapshot: Callable[[], Snapshot]) -> None:
        """Sent with the steps."""

    def close(self) -> None:
        self._run.finish()


class Prometheus:
    """`http://HOST:PORT/metrics`, as of the newest look. Port 0 takes a free one, which `port` tells."""

    def __init__(self, host: str, port: int) -> None:
        self._text = b""
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path.split("?")[0] == "/metrics"
                body = exporter._text if known else b"metrics are at /metrics\n"
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Keeps requests off the terminal."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise LaunchError(
                f"log.prometheus_port={port}: cannot listen on {host}:{port} ({error.strerror}); "
                f"0 takes a free port"
            ) from None
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def step(self, line: Mapping[str, Any]) -> None:
        """Shown with the next look."""

    def happening(self, happening: Happening) -> None:
        """Counted in the snapshot."""

    def say(self, line: str) -> None:
        """Not for a metric."""

    def look(self, snapshot: Callable[[], Snapshot]) -> None:
        self._text = prometheus_text(snapshot()).encode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def prometheus_text(snapshot: Snapshot) -> str:
    """The snapshot in Prometheus' text format."""
    return "".join(
        f"# HELP ntp_{name} {help}\n# TYPE ntp_{name} {kind}\nntp_{name}{labels} {value:.10g}\n"
        if first
        else f"ntp_{name}{labels} {value:.10g}\n"
        for name, kind, help, labels, value, first in _samples(snapshot)
    )


_Sample = tuple[str, str, str, str, float, bool]


def _samples(snapshot: Snapshot) -> Iterator[_Sample]:
    def gauge(name: str, help: str, value: float | None, kind: str = "gauge") -> Iterator[_Sample]:
        if value is not None:
            yield name, kind, help, "", float(value), True

    line = snapshot.line
    yield from gauge("step", "newest committed step", snapshot.step)
    yield from gauge("loss", "mean loss of that step", line.get("loss"))
    yield from gauge("grad_norm", "norm of its gradient", line.get("grad_norm"))
    yield from gauge("step_seconds", "time of a step, smoothed", snapshot.step_s)
    yield from gauge("tokens_per_second", "tokens, smoothed", snapshot.tokens_per_s)
    yield from gauge("mfu_ratio", "model FLOP utilisation", snapshot.mfu)
    yield from gauge("memory_bytes", "peak memory of the reporter", line.get("memory_bytes"))
    yield from gauge("goodput_ratio", "share of time in committed steps", snapshot.goodput)
    yield from gauge("capacity_ratio", "ranks with a shard over base ranks", snapshot.capacity)
    yield from gauge("mean_capacity_ratio", "its mean over time", snapshot.mean_capacity)
    yield from gauge("generation", "of membership", snapshot.generation)
    yield from gauge("recovering", "1 while no step is committed", snapshot.recovering_s is not None)
    yield from gauge("losses_total", "changes of membership by a loss", snapshot.recoveries, "counter")
    for place, (part, seconds) in enumerate(snapshot.last_recovery.items()):
        help = "parts of the newest recovery"
        yield "recovery_seconds", "gauge", help, f'{{part="{part}"}}', seconds, place == 0
    for place, replica in enumerate(snapshot.replicas):
        labels = f'{{replica="{replica.index}"}}'
        yield "degree", "gauge", "live ranks of a replica", labels, float(replica.degree), place == 0
