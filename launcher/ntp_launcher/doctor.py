"""Examinations of one machine, each a `Finding`. None changes anything; each is short."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Literal

_NEEDED = ("numpy", "pydantic", "PyYAML", "rich", "tokenizers", "safetensors")
_OPTIONAL = ("triton", "matplotlib", "tensorboard", "wandb")
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One result; `advice` says what to do, "" where nothing is to be done."""

    level: Literal["ok", "warn", "bad"]
    name: str
    found: str
    advice: str = ""


def examine(run_dir: str) -> Iterator[Finding]:
    """Everything, one after the other, so that a hang shows where it is."""
    yield Finding("ok", "system", f"{platform.platform()}, python {platform.python_version()}")
    yield from _packages()
    yield from _host(run_dir)
    yield from _gpus()
    yield from _kernels()
    yield _group()


def version_of(package: str) -> str | None:
    """The installed version, None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def torch_verdict(version: str | None) -> Finding:
    """Whether this torch is one that is supported."""
    if version is None:
        return Finding("bad", "torch", "not installed", "pip install 'torch>=2.11,<2.15'")
    major, minor = (int(part) for part in version.split("+")[0].split(".")[:2])
    if (2, 11) <= (major, minor) <= (2, 14):
        return Finding("ok", "torch", version)
    return Finding("bad", "torch", version, "versions 2.11 to 2.14 are supported")


def _packages() -> Iterator[Finding]:
    yield Finding("ok", "ntp-trainer", version_of("ntp-trainer") or "not installed, run from its source")
    yield torch_verdict(version_of("torch"))
    found = {name: version_of(name) for name in _NEEDED}
    missing = [name for name, version in found.items() if version is None]
    told = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    advice = f"pip install {' '.join(missing)}" if missing else ""
    yield Finding("bad" if missing else "ok", "packages", told, advice)
    optional = ", ".join(f"{name} {version_of(name) or 'absent'}" for name in _OPTIONAL)
    yield Finding("ok", "optional", optional)


def _host(run_dir: str) -> Iterator[Finding]:
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    busy = load > cores
    advice = "other jobs slow this one down" if busy else ""
    yield Finding("warn" if busy else "ok", "processor", f"{cores} cores, load {load:.1f}", advice)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Finding("ok", "host memory", f"{free / _GIB:.1f} GiB free")
    place = folder_verdict(run_dir)
    yield place
    if place.level == "ok":
        yield disk_verdict(run_dir, shutil.disk_usage(_existing(run_dir)).free)
    shm = Path("/dev/shm")
    if shm.exists():
        left = shutil.disk_usage(shm).free
        small = left < _GIB
        yield Finding(
            "warn" if small else "ok",
            "/dev/shm",
            f"{left / _GIB:.1f} GiB free",
            "NCCL wants 1 GiB: in a container, give --shm-size or an emptyDir of medium Memory"
            if small
            else "",
        )


def folder_verdict(run_dir: str) -> Finding:
    """Whether a run directory can be made there and written; what is made to find out is removed."""
    path, made = Path(run_dir).absolute(), list[Path]()
    try:
        made += [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return Finding("ok", "run directory", f"{run_dir!r} can be written")
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        told = f"{run_dir!r} cannot be made or written: {reason}"
        return Finding("bad", "run directory", told, "give ntp-launch another --run-dir")
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def disk_verdict(run_dir: str, free: int) -> Finding:
    """Whether much can be written."""
    small = free < 10 * _GIB
    advice = "a checkpoint takes 12 bytes a parameter; set checkpoint.dir or checkpoint.keep" if small else ""
    return Finding("warn" if small else "ok", "disk", f"{free / _GIB:.1f} GiB free at {run_dir!r}", advice)


def _existing(path: str) -> Path:
    found = Path(path).absolute()
    return next(folder for folder in (found, *found.parents) if folder.exists())


def _gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        driver = shutil.which("nvidia-smi") is not None
        advice = (
            f"torch {torch.__version__} does not see the driver's GPUs: install a CUDA build"
            if driver
            else ""
        )
        yield Finding("bad" if driver else "ok", "GPUs", "none: runs go to the processor", advice)
        return
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        used = free < 0.9 * total
        yield Finding(
            "warn" if used else "ok",
            f"GPU {index}",
            f"{card.name}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free, sm_{card.major}{card.minor}",
            "another process holds its memory (nvidia-smi names it)" if used else "",
        )
    from torch.cuda.nccl import version as nccl_version

    nccl = ".".join(str(part) for part in nccl_version())
    nvls = os.environ.get("NCCL_NVLS_ENABLE", "0")
    advice = "" if nvls == "0" else "NVLink multicast sums in an order of its own: leave it off"
    yield Finding("ok" if nvls == "0" else "bad", "NCCL", f"{nccl}, NCCL_NVLS_ENABLE={nvls}", advice)
    yield from _links()


def _links() -> Iterator[Finding]:
    """The matrix of `nvidia-smi topo -m`, a line a GPU."""
    try:
        told = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        yield Finding("warn", "links", "nvidia-smi topo does not answer", "is the driver's tool installed?")
        return
    rows = [line.split() for line in told.stdout.splitlines() if line.startswith("GPU")]
    for row in rows:
        slow = [word for word in row[1:] if word in ("SYS", "NODE", "PHB")]
        advice = (
            "a replica across these GPUs pays for every layer: keep parallel.tp inside NVLink" if slow else ""
        )
        yield Finding("warn" if slow else "ok", f"links {row[0]}", " ".join(row[1 : len(rows) + 1]), advice)


def _kernels() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("ok", "kernels", "not needed: the torch twins compute on a processor")
        return
    try:
        from ntp_kernels import selftest
    except ModuleNotFoundError as error:
        yield Finding("bad", "kernels", f"{error.name} is absent", "pip install 'ntp-trainer[gpu]'")
        return
    device = torch.device("cuda", 0)
    began = time.monotonic()
    try:
        verdict = selftest.cut_form(device)
        form = "ok" if verdict.form == "chain" else "warn"
        yield Finding(form, "kernel self-test", f"{verdict.form}: {verdict.reason}")
        print_ = selftest.fingerprint(device)
    except RuntimeError as error:
        yield Finding(
            "bad",
            "kernel self-test",
            str(error).splitlines()[0],
            "do not train on this GPU: name it in --failed",
        )
        return
    took = time.monotonic() - began
    yield Finding(
        "ok", "fingerprint", f"{print_[:32]} on {device} in {took:.1f} s; equal on GPUs that train together"
    )


def _group() -> Finding:
    """How long this process takes to build a group of itself, twice: what a recovery does."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        try:
            took = 0.0
            for attempt in range(2):
                began = time.monotonic()
                store = dist.FileStore(f"{folder}/{attempt}", 1)  # pyright: ignore[reportPrivateImportUsage]
                dist.init_process_group(
                    "gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=20)
                )
                took = time.monotonic() - began
                dist.destroy_process_group()
        except RuntimeError as error:
            told = str(error).splitlines()[0]
            return Finding("bad", "gloo group", told, "set GLOO_SOCKET_IFNAME to an interface of this host")
    return Finding("ok", "gloo group", f"rebuilt in {took * 1000:.0f} ms ({sys.platform})")
