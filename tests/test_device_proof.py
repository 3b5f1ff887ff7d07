"""Devices that compute other bits than the rest are refused before the first step."""

import pytest
import torch

from ntp.device_proof import DeviceDiffersError, DeviceProof, compare, prove
from tests.ranks import on_ranks


def verdicts(*prints):
    """What each rank is told; a print of None is a processor."""

    def body(group):
        fingerprint = prints[group.rank]
        try:
            compare(group, fingerprint and DeviceProof(f"GPU {group.rank}", fingerprint))
        except DeviceDiffersError as error:
            return str(error)
        return ""

    return on_ranks(body, len(prints))


def test_equal_devices_train_together():
    assert verdicts("a", "a", "a") == ["", "", ""]
    assert verdicts(None, None) == ["", ""]
    assert prove(torch.device("cpu")) is None


def test_the_one_that_differs_is_told_which_and_from_whom():
    fine, differs, *rest = verdicts("a", "b", "a")
    assert (fine, rest) == ("", [""])
    assert "GPU 1, fingerprint b" in differs
    assert "rank 0 (GPU 0, fingerprint a)" in differs


@pytest.mark.parametrize("prints", [("a", "b"), ("b", "a"), ("a", "b", "b", "a")])
def test_the_lowest_rank_decides_where_no_side_has_more(prints):
    assert [not told for told in verdicts(*prints)] == [each == prints[0] for each in prints]


def test_a_processor_and_a_gpu_cannot_train_together():
    fine, differs = verdicts("a", None)
    assert fine == ""
    assert "a processor" in differs
