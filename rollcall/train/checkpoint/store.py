"""Storage of checkpoints: the directory, and the rank that publishes there."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from rollcall.train.checkpoint import layout
from rollcall.train.ranks.world import World


class CheckpointStore:
    """A directory that all ranks see, for the checkpoints of a run; rank 0 publishes."""

    whole = True  # each checkpoint holds the whole state
    host_note = ""  # begins each message about damage

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
        self.directory, self.world = directory, world
        self.nodes = nodes  # a number for each rank's node, if nodes keep what their ranks hold
        # The ranks whose parts the publishing rank joins.
        self.ranks: Sequence[int] = range(world.world_size)
        if nodes:
            self.ranks = [rank for rank, node in enumerate(nodes) if node == nodes[world.rank]]
        self.publishers = sorted({nodes.index(node) for node in nodes}) or [0]  # their ranks
        self.publishes = world.rank in self.publishers
        # Steps that are kept, however old they become.
        self.held: Callable[[], Collection[int]] = lambda: ()
        self._refused: set[int] = set()  # damaged checkpoints that were not renamed
        self._keep, self._keep_every, self._best = keep, keep_every, best

    def newest(self) -> int | None:
        """Return the newest step that was not refused, the same on every rank."""
        steps = self._published().keys() - self._refused if self.world.is_main else ()
        newest: int | None = self.world.broadcast(max(steps, default=None))
        return newest

    def refuse(self, step: int) -> str:
        """Set a damaged checkpoint aside; return a note for the report if that failed."""
        if self.world.is_main:
            try:
                layout.set_aside(self.path_of(step))
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
        paths = *aside, *map(self.path_of, sorted(self._refused))
        damaged = ", ".join(path.name for path in paths)
        self.world.raise_together(
            damaged
            and f"{self.directory} holds no intact checkpoint: {damaged}; nothing was "
            "deleted. `rollcall checkpoint verify` names what is damaged. Restore a copy, or start "
            "a run with another run.name"
        )

    def facts(self, save_id: str, held: int) -> dict[str, Any]:  # noqa: ARG002
        """Return the store's own facts for the manifest of a save."""
        return {}

    def complete(self, step: int, held: Callable[[], int]) -> None:
        """Give each node its part of a checkpoint, if another node can; see `WritePlan.held`."""

    def mismatch(self, step: int) -> str:  # noqa: ARG002
        """Return the problem if the ranks' parts of a checkpoint do not match, on every rank."""
        return ""

    def path_of(self, step: int) -> Path:
        """Return the path of a step's published checkpoint."""
        return layout.path_of(self.directory, step)

    def accept(self, step: int) -> None:
        """Note on the publishing rank that a step was published, and remove stale checkpoints."""
        self._refused.discard(step)
        self.retire()

    def retire(self) -> None:
        """Remove the checkpoints that need not be kept, as every save does."""
        if self.publishes:
            paths = self._published()
            # A refused checkpoint that could not be renamed must not displace an intact one.
            steps = [step for step in paths if step not in self._refused]
            for step in layout.stale(steps, self._keep, self._keep_every, self._best()):
                if step not in self.held():
                    layout.retire(paths[step])

    def _published(self) -> dict[int, Path]:
        return layout.published(self.directory)
