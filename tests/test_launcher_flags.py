"""torchrun's options, and which node gets which ranks."""

import argparse

import pytest
from ntp_launcher.flags import LaunchError, Nodes, OneLineParser, add_torchrun_flags, nodes_from
from ntp_launcher.placement import block_size, local_ranks, node_ranks


def nodes(*argv: str, **environ: str) -> Nodes:
    parser = OneLineParser(prog="test", allow_abbrev=False)
    add_torchrun_flags(parser, environ)
    return nodes_from(parser.parse_args(argv), environ)


def test_both_spellings_of_every_option_mean_the_same() -> None:
    values = {
        "nnodes": "2",
        "node-rank": "1",
        "nproc-per-node": "4",
        "rdzv-backend": "c10d",
        "rdzv-endpoint": "host:1234",
        "rdzv-id": "job",
        "rdzv-conf": "join_timeout=30",
        "max-restarts": "3",
        "log-dir": "logs",
        "tee": "0:3,11:1",
        "local-addr": "10.0.0.1",
        "monitor-interval": "0.5",
    }
    dashed = nodes(*(f"--{name}={value}" for name, value in values.items()))
    underscored = nodes(
        *(part for name, value in values.items() for part in ("--" + name.replace("-", "_"), value))
    )
    assert dashed == underscored
    assert dashed == nodes(
        **{f"PET_{name.replace('-', '_').upper()}": value for name, value in values.items()}
    )
    assert (dashed.nnodes, dashed.node_rank, dashed.nproc_per_node) == (2, 1, 4)
    assert dashed.tee == {0: 3, 11: 1}
    assert dashed.rdzv_conf == {"join_timeout": "30"}


def test_an_option_beats_its_variable() -> None:
    assert nodes("--rdzv-id", "mine", PET_RDZV_ID="theirs").rdzv_id == "mine"


def test_one_node_meets_on_a_port_of_its_own() -> None:
    for given in (nodes(), nodes("--standalone"), nodes("--standalone", "--rdzv-endpoint", "far:1")):
        assert (given.rdzv_backend, given.rdzv_endpoint, given.local_addr) == (
            "c10d",
            "localhost:0",
            "localhost",
        )


def test_a_master_address_is_a_static_rendezvous() -> None:
    given = nodes("--nnodes=2", "--master-addr", "10.0.0.1", "--master_port", "7000")
    assert (given.rdzv_backend, given.rdzv_endpoint) == ("static", "10.0.0.1:7000")


STEP = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
TWO = ("--nnodes=2", "--rdzv-endpoint=host:1234")


def test_slurms_rank_of_a_node_counts_where_the_step_is_the_job() -> None:
    assert nodes(*TWO, **STEP).node_rank == 1
    assert nodes(*TWO, "--node-rank=0", **STEP).node_rank == 0
    assert nodes(**STEP).node_rank is None  # one node of a larger step, a job of its own
    assert nodes(*TWO, **{**STEP, "SLURM_STEP_NUM_NODES": "3"}).node_rank is None
    with pytest.raises(LaunchError, match=r"16 agents on 2 nodes.*--ntasks-per-node=1"):
        nodes(*TWO, **{**STEP, "SLURM_STEP_NUM_TASKS": "16"})


@pytest.mark.parametrize(
    ("argv", "offender"),
    [
        (["--nnodes", "x"], "'x'"),
        (["--nnodes", "0"], "'0'"),
        (["--nnodes", "1:4"], "'1:4'"),
        (["--nproc-per-node", "gpu"], "'gpu'"),
        (["--nproc-per-node", "0"], "'0'"),
        (["--node-rank", "-1"], "-1"),
        (["--rdzv-endpoint", "host:port"], "'host:port'"),
        (["--rdzv-conf", "a"], "'a'"),
        (["--tee", "4"], "'4'"),
        (["--max-restarts", "many"], "'many'"),
        (["--monitor-interval", "0"], "'0'"),
        (["--monitor-interval", "0.0001"], "'0.0001'"),
        (["--max-restart", "1"], "--max-restart"),
    ],
)
def test_a_bad_option_exits_with_2_and_one_line(
    argv: list[str], offender: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = OneLineParser(prog="test", allow_abbrev=False)
    add_torchrun_flags(parser, {})
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(argv)
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert said.count("\n") == 1
    assert offender in said


@pytest.mark.parametrize(
    ("argv", "offender"),
    [
        (["--nnodes", "2"], "--nnodes 2"),
        (["--nnodes", "2", "--standalone"], "--nnodes 2"),
        (["--node-rank", "1"], "--node-rank 1"),
        (["--master-addr", "host", "--max-restarts", "2"], "--max-restarts 2"),
    ],
)
def test_options_that_do_not_go_together_are_refused(argv: list[str], offender: str) -> None:
    with pytest.raises(LaunchError, match=offender):
        nodes(*argv)


def test_ranks_are_cut_into_one_block_per_node() -> None:
    assert block_size(8, 2, None) == 4
    assert block_size(9, 2, None) == 5
    assert block_size(8, 1, 8) == 8
    assert local_ranks(1, 4, {0, 1, 4, 6, 7}) == {4: 0, 6: 2, 7: 3}
    assert local_ranks(0, 4, {4, 5}) == {}


@pytest.mark.parametrize(
    ("world", "nnodes", "size"), [(8, 1, 3), (8, 2, 3), (8, 2, 8), (2, 3, None), (8, 1, 9)]
)
def test_too_few_places_or_an_idle_node_is_refused(world: int, nnodes: int, size: int | None) -> None:
    with pytest.raises(LaunchError, match=str(world)):
        block_size(world, nnodes, size)


def test_claimed_blocks_are_kept_and_the_rest_filled_up() -> None:
    assert node_ranks([None, None]) == [0, 1]
    assert node_ranks([1, 0]) == [1, 0]
    assert node_ranks([None, 0, None]) == [1, 0, 2]
    with pytest.raises(LaunchError, match="--node-rank 1"):
        node_ranks([1, 1])


def test_help_names_every_option() -> None:
    parser = argparse.ArgumentParser()
    add_torchrun_flags(parser, {})
    assert all(
        option in parser.format_help() for option in ("--nnodes", "--rdzv-endpoint", "--standalone", "--tee")
    )
