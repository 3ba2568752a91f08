"""Virtual shards: the fixed pieces into which exact mode divides a batch. Imports no torch.

The shards and the order in which they are summed depend on the configuration alone, so any number
of ranks computes the same bits if each holds the same number of shards.
"""


def check_ranks(world_size: int, shards: int) -> None:
    """Check that the shards can be divided equally among the ranks.

    Raises:
        ValueError: they cannot; the message names the numbers of ranks that work.
    """
    fitting = [2**k for k in range(shards.bit_length())]
    if world_size not in fitting:
        more = f" (more with exact_shards above {shards})" if world_size > shards else ""
        raise ValueError(
            f"exact=true needs {', '.join(map(str, fitting[:-1]))} or {shards} ranks{more}, "
            f"but {world_size} were started"
        )


def own(rank: int, world_size: int, shards: int) -> range:
    """Return the shards of a rank: consecutive ones, so that it can sum a whole subtree."""
    each = shards // world_size
    return range(rank * each, (rank + 1) * each)
