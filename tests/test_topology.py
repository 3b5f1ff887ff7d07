"""Failed ranks as a user spells them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntp.errors import TopologyError
from ntp.topology import parse_failed


@pytest.mark.parametrize(
    ("texts", "ranks"),
    [
        ([], set()),
        (["3"], {3}),
        (["3,5"], {3, 5}),
        (["3", "5"], {3, 5}),
        (["dp=0/tp=3"], {3}),
        (["dp=1/tp=0, 7"], {4, 7}),
        (["8,9"], {8, 9}),  # standbys
    ],
)
def test_ranks_and_coordinates_name_base_mesh_ranks(texts: list[str], ranks: set[int]) -> None:
    assert parse_failed(texts, dp=2, tp=4, standbys=2) == ranks


def test_a_file_names_one_a_line_with_comments_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "failed.txt"
    path.write_text("# rack 7\n3\n\n  dp=1/tp=1  # flaky\n")
    assert parse_failed([f"@{path}", "0"], dp=2, tp=4, standbys=0) == {0, 3, 5}


@pytest.mark.parametrize(
    ("texts", "offender"),
    [
        (["8"], "'8'"),
        (["dp=2/tp=0"], "'dp=2/tp=0'"),
        (["dp=0/tp=4"], "'dp=0/tp=4'"),
        (["3,3"], "'3'"),
        (["3", "dp=0/tp=3"], "'dp=0/tp=3'"),
        (["-1"], "'-1'"),
        (["x"], "'x'"),
        (["3,"], "''"),
        (["tp=3"], "'tp=3'"),
        (["٣"], "'٣'"),
        (["9" * 5000], "9999"),
        (["@/no/such/file"], "@/no/such/file"),
        (["@"], "expected @FILE"),
        (["0,1,2,3,4,5,6,7"], "0, 1, 2, 3, 4, 5, 6, 7"),
    ],
)
def test_a_bad_name_is_refused_in_one_line_that_contains_it(texts: list[str], offender: str) -> None:
    with pytest.raises(TopologyError) as caught:
        parse_failed(texts, dp=2, tp=4, standbys=0)
    assert offender in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_line_of_a_file_is_refused_by_its_text(tmp_path: Path) -> None:
    path = tmp_path / "failed.txt"
    path.write_text("3\n3,5\n")
    with pytest.raises(TopologyError, match="'3,5'"):
        parse_failed([f"@{path}"], dp=2, tp=4, standbys=0)


def test_standbys_alone_are_something_left() -> None:
    assert parse_failed(["0,1"], dp=1, tp=2, standbys=1) == {0, 1}


@given(st.integers(1, 6), st.integers(1, 9), st.data())
def test_both_spellings_agree_on_every_rank(dp: int, tp: int, data: st.DataObject) -> None:
    replica, position = data.draw(st.integers(0, dp - 1)), data.draw(st.integers(0, tp - 1))
    by_coordinate = parse_failed([f"dp={replica}/tp={position}"], dp, tp, standbys=1)
    assert by_coordinate == parse_failed([str(replica * tp + position)], dp, tp, standbys=1)
