"""Which node runs which base-mesh ranks: pure functions.

The ranks of the base mesh, failed ones included, are cut into one contiguous block per node, so that a rank's
place (and its GPU, the rank's offset in the block) does not depend on which others have failed.
"""

from collections.abc import Collection, Sequence

from ntp_launcher.flags import LaunchError


def block_size(world_size: int, nnodes: int, nproc_per_node: int | None) -> int:
    """Base-mesh ranks per node.

    Raises LaunchError when the nodes have too few places, a node has more than all ranks together, or none.
    """
    size = nproc_per_node or -(-world_size // nnodes)
    if size * nnodes < world_size:
        raise LaunchError(
            f"--nproc-per-node {size} on --nnodes {nnodes} gives {size * nnodes} processes, "
            f"the mesh of the config has {world_size} ranks"
        )
    if size > world_size:
        raise LaunchError(
            f"--nproc-per-node {size} on one node is more than all {world_size} ranks of the mesh of the "
            f"config; give {world_size}, or leave it out"
        )
    if size * (nnodes - 1) >= world_size:
        raise LaunchError(
            f"--nnodes {nnodes} with {size} processes each leaves a node without a rank of the "
            f"{world_size}-rank mesh; use fewer nodes or a smaller --nproc-per-node"
        )
    return size


def node_ranks(claims: Sequence[int | None]) -> list[int]:
    """The block of each agent, in rendezvous order: the one it claims, or the lowest that nobody claims.

    Raises LaunchError when two agents claim one block.
    """
    claimed = [claim for claim in claims if claim is not None]
    for claim in claimed:
        if claimed.count(claim) > 1:
            raise LaunchError(f"--node-rank {claim} is given on {claimed.count(claim)} nodes")
    free = iter(sorted(set(range(len(claims))) - set(claimed)))
    return [next(free) if claim is None else claim for claim in claims]


def local_ranks(node_rank: int, size: int, started: Collection[int]) -> dict[int, int]:
    """Base-mesh rank -> local rank (offset in the block), for the ranks of a node that are started."""
    first = node_rank * size
    return {rank: rank - first for rank in sorted(started) if first <= rank < first + size}
