"""What may a user ask for? Every key, with its type, default and meaning. No torch.

`config.py` fills the schema; `python -m train --help` and `recipes/schema.json` are made from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import yaml

from train.parallel.mesh import PRESETS, fit
from train.sections import ConfigError as ConfigError
from train.sections import Faults, Field, Train
from train.sections import Model as Model
from train.sections import Optim as Optim
from train.sections import Section as Section

if TYPE_CHECKING:
    Strategy = str
else:
    Strategy = Literal[tuple(PRESETS)]


class Run(Section):
    """Where a run keeps what it writes."""

    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="name of the run and of its directory; the same name resumes the same run "
        "(default: recipe, date and time)",
    )
    root: str = Field(default="runs", min_length=1, description="directory that holds the runs")


class Data(Section):
    """What the model learns from."""

    name: str = Field(
        default="digits",
        description="digits, mnist, fashionmnist, cifar10, cifar100, folder, text, tokens, "
        "synthetic_images, synthetic_tokens, or package.module:attribute (docs/data.md)",
    )
    root: str = Field(
        default="datasets",
        min_length=1,
        description="directory of downloaded data, shared by the ranks",
    )
    path: str | None = Field(
        default=None,
        description="folder: directory of class directories; tokens: of train.bin and val.bin; "
        "text: files, directories or patterns, with commas between them",
    )
    context: int = Field(default=128, ge=1, description="bytes or tokens of a sample")
    classes: int | None = Field(
        default=None,
        ge=1,
        description="tokens: size of the vocabulary (default: by reading the files once); "
        "synthetic: how many classes or tokens",
    )
    image: int = Field(default=224, ge=1, description="folder, synthetic_images: pixels of an edge")
    samples: int = Field(default=10_000, ge=1, description="synthetic: training samples")
    augment: bool = Field(
        default=False,
        description="cifar10, cifar100, folder: train on randomly cut and mirrored images",
    )
    global_batch: int = Field(default=64, ge=1, description="samples per step, over all ranks")
    micro_batch: int | None = Field(
        default=None,
        ge=1,
        description="samples per forward and backward on one rank; gradients accumulate over as "
        "many as the rank's share needs (default: the whole share at once)",
    )
    workers: int = Field(
        default=0, ge=0, description="processes of each rank that read ahead; 0 reads in the rank"
    )
    prefetch: int = Field(default=2, ge=1, description="batches that each worker reads ahead")
    skip_unreadable: int = Field(
        default=0, ge=0, description="samples of an epoch that may be unreadable and are left out"
    )


class Parallel(Section):
    """How the model is spread over the ranks."""

    strategy: Strategy = Field(
        default="ddp",
        description="single: one rank; dp: the GPUs of one process; ddp: replicas; zero1, zero2, "
        "zero3: optimizer state, gradients, weights in shards; hsdp: shards inside a node, "
        "replicas between nodes; tensor: cut layers; context: cut sequences; pipeline: stages of "
        "layers; split: layers over ranks, or over the GPUs of one process, one after the other",
    )
    mesh: str | None = Field(
        default=None,
        description="degrees in place of the strategy's: shard=rest,tensor=2 (docs/parallel.md)",
    )
    schedule: (
        Literal[
            "1f1b",
            "gpipe",
            "interleaved",
            "breadth-first",
            "zero-bubble",
            "zbv",
            "dualpipev",
            "sequential",
        ]
        | None
    ) = Field(
        default=None,
        description="of pipeline stages; sequential is a micro-batch after the other (default: "
        "1f1b, with split sequential)",
    )
    stages_per_rank: int = Field(
        default=2, ge=2, description="of the schedules from interleaved to dualpipev"
    )
    balance: Literal["flops", "time"] = Field(
        default="flops",
        description="the cost of layers by which stages are made equal: counted, or measured",
    )
    sequence: bool = Field(
        default=False,
        description="tensor: norms and what else lies between cut layers is computed in pieces of "
        "the sequences",
    )
    offload: bool = Field(default=False, description="shards lie in host memory, not on the GPU")
    bucket_mb: float | None = Field(
        default=None, gt=0, description="MiB of gradients that ddp sends at once (default: torch's)"
    )
    static_graph: bool = Field(default=False, description="ddp: all steps use the same weights")
    compression: Literal["none", "fp16", "bf16", "powersgd"] = Field(
        default="none", description="how ddp packs gradients; all but none change the result"
    )

    @property
    def mesh_text(self) -> str:
        """The mesh as text: the user's, or the strategy's own."""
        return PRESETS[self.strategy].mesh if self.mesh is None else self.mesh

    @property
    def schedule_name(self) -> str:
        """The schedule of pipeline stages: the user's, or the strategy's own."""
        return self.schedule or PRESETS[self.strategy].schedule

    @property
    def stage(self) -> int:
        """What shards divide: 1 optimizer state, 2 gradients too, 3 weights too."""
        return PRESETS[self.strategy].stage

    def degrees(self, world_size: int, node_size: int) -> dict[str, int]:
        """The degree of each dimension of the mesh.

        Args:
            world_size: ranks there are.
            node_size: ranks of one node.

        Raises:
            ConfigError: the mesh does not fit.
        """
        try:
            return fit(self.mesh_text, world_size, node_size)
        except ValueError as error:
            key = f"strategy={self.strategy}" if self.mesh is None else f"mesh={self.mesh}"
            raise ConfigError(f"parallel.{key} {error}") from None


class Checkpoint(Section):
    """When the state of the run is saved."""

    every: int | None = Field(
        default=100,
        ge=1,
        description="steps between checkpoints; null saves by the clock, at the end and on a stop",
    )
    minutes: float | None = Field(
        default=None, gt=0, description="minutes between checkpoints, beside those by steps"
    )
    auto: bool = Field(
        default=False,
        description="time between checkpoints that loses least: it follows from what a save costs "
        "and how often this run fails (Young, Daly)",
    )
    failure_hours: float = Field(
        default=24, gt=0, description="mean hours between failures, as auto assumes at first"
    )
    keep: int = Field(default=2, ge=1, description="how many of the newest checkpoints stay")
    forever: int | None = Field(
        default=None, ge=1, description="checkpoints of the multiples of this step stay, too"
    )
    best: Literal["loss", "accuracy"] | None = Field(
        default=None,
        description="validation metric whose best checkpoint stays, too; it is saved when it is "
        "evaluated (train.evaluate_every)",
    )
    local: str | None = Field(
        default=None,
        min_length=1,
        description="directory on each node's own disk, such as $TMPDIR: saves go there first and "
        "are copied to the run's directory beside the training",
    )


class Log(Section):
    """What is reported, and how often."""

    every: int = Field(default=10, ge=1, description="steps between lines of metrics.jsonl")
    fingerprints: bool = Field(
        default=False,
        description="write a hash of every tensor of every step to fingerprints.jsonl; needs exact",
    )


class Config(Section):
    """Everything a run was asked for."""

    seed: int = Field(default=0, ge=0, lt=2**63, description="start of all randomness of the run")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto takes the GPUs where there are any"
    )
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp8"] = Field(
        default="fp32",
        description="number format of forward and backward; the weights stay fp32 "
        "(docs/training.md)",
    )
    exact: bool = Field(
        default=False,
        description="the weights are the same to the last bit on any number of ranks that divides "
        "exact_shards (docs/exact.md)",
    )
    exact_shards: Literal[2, 4, 8, 16, 32, 64, 128, 256] = Field(
        default=8, description="pieces of the global batch in exact mode; part of the result"
    )
    run: Run = Run()
    data: Data = Data()
    model: Model = Model()
    optim: Optim = Optim()
    parallel: Parallel = Parallel()
    train: Train = Train()
    faults: Faults = Faults()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()

    def to_yaml(self) -> str:
        """The complete configuration as YAML, in the order of the schema."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)
