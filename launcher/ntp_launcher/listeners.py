"""Who listens to a job: the terminal that was asked for and the metrics that its configuration names."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

from ntp.config import Config
from ntp_launcher.audience import Audience, Listener
from ntp_launcher.exporters import TensorBoard, WeightsAndBiases
from ntp_launcher.job import Job, writing
from ntp_launcher.prometheus import Prometheus
from ntp_launcher.terminals import terminal

_PEAKS = {"H200": 989e12, "H100": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}
"""Dense bf16 FLOP/s by a part of the device's name, from the vendor's data sheets (SXM forms)."""


def audience_of(job: Job, run_dir: Path) -> Audience:
    """Everyone who listens. Raises LaunchError for an exporter that cannot start."""
    exporters = [*_exporters(job.config, run_dir)]
    screen = terminal(job.config, job.display.quiet, job.display.log_format)
    for exporter in exporters:
        if isinstance(exporter, Prometheus):
            screen.say(f"metrics at {exporter.url}")
    listeners = [*exporters, screen]
    with writing(str(run_dir)):
        return Audience(job.config, run_dir, listeners, _peak_flops(job.config))


def _exporters(config: Config, run_dir: Path) -> Iterator[Listener]:
    log = config.log
    if log.tensorboard:
        yield TensorBoard(config, run_dir / "tensorboard")
    if log.wandb is not None:
        yield WeightsAndBiases(config, log.wandb, run_dir)
    if log.prometheus_port is not None:
        yield Prometheus(log.prometheus_host, log.prometheus_port)


def _peak_flops(config: Config) -> float | None:
    """Of this host's first GPU in bf16; None for another dtype, on a CPU, and for a device not listed."""
    if config.train.device == "cpu" or config.train.dtype != "bfloat16":
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next((peak for name, peak in _PEAKS.items() if name in found.partition("\n")[0]), None)
