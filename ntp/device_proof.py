"""GPUs that train together must compute the same bits: each shows what it computes before its first step.

The fingerprint hashes fixed probes over all kernels (`ntp_kernels.selftest`). A device of another model, or
with other versions of driver, Triton or torch, may well have the same one; what differs must not train, since
no exchange would notice. Processors are not probed: their twins are torch's own operations.
"""

from collections import Counter
from dataclasses import asdict, dataclass

import torch

from ntp.collectives import Group
from ntp.messages import gather_values


class DeviceDiffersError(RuntimeError):
    """This device computes other bits than those that it is to train with."""


@dataclass(frozen=True, slots=True)
class DeviceProof:
    """What a device is and computes."""

    name: str
    fingerprint: str


def prove(device: torch.device) -> DeviceProof | None:
    """Probe a GPU; it takes under a second once the kernels are compiled. None for a processor."""
    if device.type != "cuda":
        return None
    from ntp_kernels import selftest

    name = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return DeviceProof(name, selftest.fingerprint(device))


def compare(world: Group, proof: DeviceProof | None) -> None:
    """Compare with all processes of a generation; collective over `world`, which carries host tensors.

    Raises:
        DeviceDiffersError: on those that differ from most; from the lowest rank's where no side has more.
    """
    values = gather_values(world, None if proof is None else asdict(proof))
    proofs = {rank: value and DeviceProof(**value) for rank, value in zip(world.ranks, values, strict=True)}
    prints = {rank: each and each.fingerprint for rank, each in sorted(proofs.items())}
    ((common, _),) = Counter(prints.values()).most_common(1)
    if prints[world.ranks[world.rank]] == common:
        return
    other = next(rank for rank, each in prints.items() if each == common)
    raise DeviceDiffersError(
        f"this device ({_described(proof)}) computes other bits than that of rank {other} "
        f"({_described(proofs[other])}): they cannot train together"
    )


def _described(proof: DeviceProof | None) -> str:
    return "a processor" if proof is None else f"{proof.name}, fingerprint {proof.fingerprint[:16]}"
