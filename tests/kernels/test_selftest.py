"""The start-up self-test: who passes, who is sent to the other form, what the fingerprint sees."""

import numpy as np
import pytest
import torch
from ntp_kernels import integer_model, selftest


@pytest.mark.gpu
def test_hopper_may_use_biased_chains(device: torch.device) -> None:
    assert selftest.cut_form(device).form == "chain"


@pytest.mark.gpu
def test_the_fingerprint_is_the_same_twice(device: torch.device) -> None:
    assert selftest.fingerprint(device) == selftest.fingerprint(device)


def test_a_device_that_rounds_otherwise_is_sent_to_leaves(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("the interpreter is the device that rounds otherwise")
    verdict = selftest.cut_form(device)
    assert verdict.form == "leaf"
    assert "differ" in verdict.reason


def test_a_device_that_adds_as_the_model_passes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_the_model(a, w, row, column, total_units, first_unit):
        bound = (row.bound[:, None] * column[None, :]).cpu().numpy()
        start = integer_model.chain_start(np.frexp(bound)[1] + 1)
        total = np.zeros_like(start, dtype=np.int32)
        for unit in range(a.shape[1]):
            k = 16 * (first_unit + unit)
            sign = -1 if total_units > 4096 and k // 4096 % 2 else 1
            values = a[:, unit].float().cpu().numpy(), w[unit].float().cpu().numpy().T.copy()
            chain = integer_model.chain_integer(integer_model.matmul(*values, sign * start))
            total += sign * (chain + 3 * (k + 16) // 128 - 3 * k // 128)
        return torch.from_numpy(total)

    monkeypatch.setattr(selftest, "cut_matmul", as_the_model)
    assert selftest.cut_form(device).form == "chain"


def test_the_pattern_is_fixed(device: torch.device) -> None:
    values = selftest.pattern((2, 3), device, seed=1).float().cpu()
    assert torch.equal(values, selftest.pattern((2, 3), device, seed=1).float().cpu())
    assert 0.5 < values.abs().max() <= 1
