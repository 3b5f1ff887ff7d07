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
        begin, end = 16 * first_unit, 16 * (first_unit + a.shape[1])
        bound = (row.bound[:, None] * column[None, :]).cpu().numpy()
        start = integer_model.chain_start(np.frexp(bound)[1] + 1)
        flat_a = a.float().cpu().numpy().reshape(a.shape[0], -1)
        flat_w = w.float().cpu().numpy().reshape(-1, w.shape[2])
        chain = integer_model.matmul(flat_a, np.ascontiguousarray(flat_w.T), start)
        integers = integer_model.chain_integer(chain) + 3 * end // 128 - 3 * begin // 128
        return torch.from_numpy(integers)

    monkeypatch.setattr(selftest, "cut_matmul", as_the_model)
    assert selftest.cut_form(device).form == "chain"


def test_the_pattern_is_fixed(device: torch.device) -> None:
    values = selftest.pattern((2, 3), device, seed=1).float().cpu()
    assert torch.equal(values, selftest.pattern((2, 3), device, seed=1).float().cpu())
    assert 0.5 < values.abs().max() <= 1
