"""Traces of chosen steps, for chrome://tracing or Perfetto."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

TRACES = "traces"
"""Their folder in a run directory."""


@contextmanager
def traced(run_dir: Path, step: int, rank: int, device: torch.device) -> Iterator[None]:
    """Records what happens inside and writes it to `RUN_DIR/traces/step<n>-rank<k>.json`.

    A step that a loss cuts short leaves no trace; when it is replayed it gets one.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        yield
    folder = run_dir / TRACES
    folder.mkdir(exist_ok=True)
    recorded.export_chrome_trace(str(folder / f"step{step}-rank{rank}.json"))
