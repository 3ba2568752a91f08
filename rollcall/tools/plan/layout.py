"""The layout of a run on its ranks: degrees, micro-batches, what is recomputed. No torch."""

import dataclasses

from rollcall.config.checks import V_SHAPED


class Terms(dict[str, float]):
    """Seconds or bytes by name, which add up."""

    def total(self) -> float:
        """Return the sum."""
        return sum(self.values())

    def add(self, name: str, value: float) -> None:
        """Add to a term."""
        self[name] = self.get(name, 0.0) + value


@dataclasses.dataclass(frozen=True)
class Layout:
    """The degrees of the mesh multiply to the ranks, the outermost dimension first.

    Attributes:
        data: ranks with other samples; `expert` of them divide the experts of a layer.
        stages: of the pipeline, each of `chunks` pieces of the model per rank.
        zero: what data ranks divide: 0 nothing, 1 optimizer state, 2 also gradients, 3 also
            weights; among `shard` of them.
        scattered: whether gradients are divided after each micro-batch, not once in a step.
        sequence: whether tensor ranks divide the activations between the cut layers.
        micro: samples in a micro-batch.
        batch: samples in a step, over all ranks.
        imbalance: tokens of the fullest rank of experts, relative to the mean.
        recompute: "none", "selective" (attention) or "full" (each layer).
    """

    data: int = 1
    tensor: int = 1
    stages: int = 1
    context: int = 1
    expert: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    zero: int = 0
    shard: int = 0  # 0: all data ranks
    scattered: bool = False
    sequence: bool = True
    micro: int = 1
    batch: int = 1
    recompute: str = "none"
    imbalance: float = 1.0
    precision: str = "bf16"

    @property
    def ranks(self) -> int:
        """The world size."""
        return self.data * self.tensor * self.stages * self.context

    @property
    def mesh(self) -> tuple[int, ...]:
        """The degrees by which meshes of equally many ranks differ."""
        return self.tensor, self.stages, self.context, self.zero, self.shard, self.expert

    @property
    def last(self) -> int:
        """The pipeline's rank with the end of the model; in a V it has the beginning, too."""
        return 0 if self.schedule in V_SHAPED else self.stages - 1

    @property
    def width(self) -> int:
        """Bytes of a value with which products compute."""
        return 4 if self.precision in ("fp32", "tf32") else 2

    @property
    def shards(self) -> int:
        """Data ranks that divide what `zero` says; pieces of a sequence share weights too."""
        return (self.shard or self.data) * self.context if self.zero else 1

    @property
    def micro_batches(self) -> int:
        """Per rank and step; the last may be smaller."""
        return max(1, -(-self.batch // (self.data * self.micro)))
