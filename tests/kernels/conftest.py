"""Kernel tests run on the GPU where there is one, else at the same tiny shapes in Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read by Triton when a kernel is decorated, so it must be set before any kernel module is imported.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    # The interpreter computes with numpy, which warns where a GPU silently gives Inf or NaN.
    silence = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
    for item in items:
        item.add_marker(silence)
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def draw(device: torch.device):
    """Return `draw(*shape, dtype=torch.bfloat16)`: seeded Gaussian numbers on the device."""
    generator = torch.Generator().manual_seed(20)

    def sample(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    return sample


@pytest.fixture
def rounded(device: torch.device):
    """Return `rounded(x, dtype)`: what a kernel stores for f32 x. Triton's interpreter truncates to bf16."""

    def store(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if device.type == "cuda" or dtype != torch.bfloat16:
            return x.to(dtype)
        return (x.view(torch.int32) & -65536).view(torch.float32).to(dtype)

    return store
