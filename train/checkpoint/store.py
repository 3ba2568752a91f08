"""Where are checkpoints kept, and who publishes them? On shared storage, rank 0 does."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollcall.train.checkpoint import layout
from rollcall.train.dist.world import World


class Store:
    """A directory that all ranks see, for the checkpoints of a run; rank 0 publishes."""

    whole = True  # whether each checkpoint holds the whole state
    host_note = ""  # what messages about damage begin with

    def __init__(
        self,
        directory: Path,
        world: World,
        keep: int = 2,
        keep_every: int | None = None,
        best: Callable[[], int | None] = lambda: None,
        nodes: Sequence[int] = (),
    ) -> None:
        """Keep the newest `keep`, the multiples of `keep_every` and the step from `best`."""
        self.directory = directory
        self.world = world
        self.nodes = nodes  # each rank's node, if each node keeps what its ranks hold
        # Whose parts the publishing rank joins.
        self.ranks: Sequence[int] = range(world.world_size)
        if nodes:
            self.ranks = [rank for rank, node in enumerate(nodes) if node == nodes[world.rank]]
        self.publishes = world.rank == self.ranks[0]
        # How many ranks publish.
        self.publishers = len(set(nodes)) or 1
        self._refused: set[int] = set()  # damaged checkpoints that were not renamed
        self._keep, self._keep_every, self._best = keep, keep_every, best

    def newest(self) -> int | None:
        """Return the newest step that was not refused, the same on every rank."""
        found = layout.published(self.directory) if self.world.is_main else {}
        newest: int | None = self.world.broadcast(max(found.keys() - self._refused, default=None))
        return newest

    def stale(self, steps: Sequence[int]) -> list[int]:
        """Return which of these steps may be removed."""
        return layout.stale(steps, self._keep, self._keep_every, self._best())

    def refuse(self, step: int) -> str:
        """Do not offer this damaged checkpoint again; return what to add to the report."""
        if self.world.is_main:
            try:
                layout.set_aside(self.place(step))
            except OSError as error:
                self._refused.add(step)
                return f" (it could not be set aside: {error.strerror})"
        return ""

    def writer(self, owner: str) -> str:
        """Return the host and the process that write here, given rank 0's `layout.owner`."""
        return owner.rpartition("-")[0]

    def check_fresh_start(self) -> None:
        """Raise ConfigError if there were checkpoints, and all of them are damaged."""
        aside = layout.refused(self.directory) if self.world.is_main else []
        damaged = [path.name for path in (*aside, *map(self.place, sorted(self._refused)))]
        self.world.raise_together(
            f"{self.directory} holds no intact checkpoint: {', '.join(damaged)}; nothing was "
            "deleted. `rollcall checkpoint verify` names what is damaged. Restore a copy, or start "
            "a run with another run.name"
            if damaged
            else ""
        )

    def facts(self, save_id: str) -> dict[str, Any]:  # noqa: ARG002
        """Return what the store itself notes in the manifest of a save."""
        return {}

    def mismatch(self, step: int) -> str:  # noqa: ARG002
        """Say why the ranks' parts of a checkpoint do not match; the same on every rank."""
        return ""

    def place(self, step: int) -> Path:
        """Return the path of a step's published checkpoint."""
        return layout.place(self.directory, step)

    def accept(self, step: int) -> None:
        """Note on the publishing rank that a step was published, and remove what is stale."""
        self._refused.discard(step)
        self.retire()

    def retire(self) -> None:
        """Remove the checkpoints that need not be kept, as every save does."""
        if self.publishes:
            found = layout.published(self.directory)
            # A refused one that could not be renamed must not displace an intact one.
            for step in self.stale([step for step in found if step not in self._refused]):
                layout.retire(found[step])
