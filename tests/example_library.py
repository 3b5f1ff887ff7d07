"""A model and a training loop of one's own: a classifier with squared ReLUs, on a mesh that has lost a rank.

`python -m tests.example_library` runs it on a healthy mesh and without rank 3. The model says how each
parameter is cut into units. Activations must not depend on how many units are in a call: correctly rounded
arithmetic as here, or `ntp.ops`. Weights are no autograd leaves, so the input is one.
"""

import torch
from torch import Tensor

from ntp.config import OptimizerConfig, ParallelConfig
from ntp.evidence import state_hashes
from ntp.layers import ColumnParallelLinear, RMSNorm, RowParallelLinear, VocabParallelHead, refresh_scales
from ntp.parameters import ParameterSpec, Part
from ntp.plan import plan_units
from ntp.testing import Member, simulate
from ntp.trainer import make_weights, wrap
from ntp.units import UnitKind

FEATURES, WIDTH, BLOCK, CLASSES, CLASS_BLOCK = 64, 200, 32, 40, 16
EXAMPLES, MICROBATCHES, STEPS = 48, 4, 8
UNITS = {UnitKind.FFN: -(-WIDTH // BLOCK), UnitKind.VOCAB: -(-CLASSES // CLASS_BLOCK)}


def matrix(index: int, name: str, kind: UnitKind, rows: int, size: int, transposed: bool = False):
    parts = (Part(f"{name}.weight", 0, rows, size, transposed),)
    return ParameterSpec(index, name, kind, UNITS[kind], (rows, FEATURES), parts, "normal", decay=True)


NORM = (Part("norm.weight", 0, FEATURES, FEATURES),)
SPECS = (
    ParameterSpec(0, "norm", None, 1, (FEATURES,), NORM, "ones", decay=False),
    matrix(1, "up", UnitKind.FFN, BLOCK, WIDTH),
    matrix(2, "down", UnitKind.FFN, BLOCK, WIDTH, transposed=True),  # contracts over WIDTH: rows of units too
    matrix(3, "head", UnitKind.VOCAB, CLASS_BLOCK, CLASSES),
)


class Classifier:
    def __init__(self, weights, group):
        self.norm = RMSNorm(weights["norm"], 1e-5)
        self.up = ColumnParallelLinear(weights["up"], group)
        self.down = RowParallelLinear(weights["down"], group)
        self.head = VocabParallelHead(ColumnParallelLinear(weights["head"], group), CLASSES)

    def losses(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden, residual = self.norm(x, None)
        return self.head.losses(residual + self.down(self.up(hidden).relu().square()), labels)


def batch(step: int, index: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step * MICROBATCHES + index)
    x = torch.randn(EXAMPLES, FEATURES, generator=draw)
    return x.requires_grad_(), (x[:, :5] > 0).long() @ torch.tensor([1, 2, 4, 8, 16])


def train(member: Member) -> tuple[float, str]:
    weights = make_weights(SPECS, member.plan, member.rank)
    ddp, optimizer = wrap(SPECS, weights, member.plan, member.mesh, OptimizerConfig())
    optimizer.initialise(seed=1, init_std=0.1)
    model = Classifier(weights, member.mesh.tensor)
    for step in range(1, STEPS + 1):
        refresh_scales(weights.values(), member.mesh.tensor)
        for index in ddp.microbatches():
            model.losses(*batch(step, index)).sum().backward()
        optimizer.commit(ddp.sync(), EXAMPLES * MICROBATCHES, learning_rate=0.03, step=step)
    refresh_scales(weights.values(), member.mesh.tensor)
    hashes = state_hashes(optimizer, member.mesh.workers)
    return model.losses(*batch(0, 0)).mean().item(), hashes.weights_sha256


def run(failed: set[int]) -> tuple[float, str]:
    plan = plan_units(UNITS, ParallelConfig(dp=2, tp=4), MICROBATCHES, failed=failed)
    return simulate(train, plan)[plan.reporter]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(*run(set()), *run({3}), sep="\n")
