"""What may a user ask for? Every key, with its type, default and meaning. No torch.

`config.py` fills the schema; `python -m train --help` and `recipes/schema.json` are made from it.
"""

from __future__ import annotations

import os
from typing import Literal

# Scanning every installed package for pydantic plugins costs a sixth of the start of a command.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

import yaml
from pydantic import BaseModel, ConfigDict, Field

from train.parallel.mesh import PRESETS, fit


class ConfigError(ValueError):
    """A user's request that cannot be met; the message says what was expected and what to do."""


class Section(BaseModel):
    """A group of keys: unknown ones are refused, values do not change once they are checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


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

    name: str = Field(default="digits", description="digits, mnist, text, package.module:attribute")
    root: str = Field(
        default="datasets",
        min_length=1,
        description="directory of downloaded data, shared by the ranks",
    )
    context: int = Field(default=128, ge=1, description="bytes of a sample of text")
    global_batch: int = Field(default=64, ge=1, description="samples per step, over all ranks")
    micro_batch: int | None = Field(
        default=None,
        ge=1,
        description="samples per forward and backward on one rank; gradients accumulate over as "
        "many as the rank's share needs (default: the whole share at once)",
    )


class Model(Section):
    """What is trained."""

    name: str = Field(default="cnn", description="cnn, mlp, gpt, or package.module:attribute")
    hidden: int = Field(default=128, ge=1, description="width of the hidden layer; of gpt's blocks")
    layers: int = Field(default=4, ge=1, description="blocks of gpt")
    heads: int = Field(default=4, ge=1, description="heads of gpt's attention")
    kv_heads: int = Field(default=2, ge=1, description="heads of keys and values that they share")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="probability of dropping a hidden unit"
    )


class Optim(Section):
    """How a step changes the weights."""

    name: Literal["sgd", "adam", "adamw"] = Field(default="adamw", description="the optimizer")
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay (for adamw decoupled)")
    momentum: float = Field(
        default=0.9, ge=0, lt=1, description="momentum of sgd; the others ignore it"
    )
    schedule: Literal["constant", "cosine"] = Field(
        default="constant",
        description="learning rate after the warm-up; cosine falls to zero at the end",
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warm-up from zero")
    clip_norm: float | None = Field(
        default=None, gt=0, description="largest norm of the whole gradient (default: no clipping)"
    )


class Parallel(Section):
    """How the model is spread over the ranks."""

    strategy: Literal[
        "single", "dp", "ddp", "zero1", "zero2", "zero3", "hsdp", "tensor", "pipeline"
    ] = Field(
        default="ddp",
        description="single: one rank; dp: the GPUs of one process; ddp: replicas; zero1, zero2, "
        "zero3: optimizer state, gradients, weights in shards; hsdp: shards inside a node, "
        "replicas between nodes; tensor: cut layers; pipeline: stages of layers",
    )
    mesh: str | None = Field(
        default=None,
        description="degrees in place of the strategy's: shard=rest,tensor=2 (docs/parallel.md)",
    )
    schedule: Literal["1f1b", "gpipe"] = Field(default="1f1b", description="of pipeline stages")
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


class Train(Section):
    """How long to train."""

    epochs: float = Field(default=10, gt=0, description="passes over the training data")
    steps: int | None = Field(
        default=None, ge=1, description="stop after this many steps instead (default: by epochs)"
    )
    evaluate_every: float | None = Field(
        default=None, gt=0, description="epochs between evaluations (default: only at the end)"
    )


class Checkpoint(Section):
    """When the state of the run is saved."""

    every: int | None = Field(
        default=100,
        ge=1,
        description="steps between checkpoints; null saves only at the end and on a stop",
    )
    keep: int = Field(default=2, ge=1, description="how many of the newest checkpoints stay")


class Log(Section):
    """What is reported, and how often."""

    every: int = Field(default=10, ge=1, description="steps between lines of metrics.jsonl")


class Config(Section):
    """Everything a run was asked for."""

    seed: int = Field(default=0, ge=0, lt=2**63, description="start of all randomness of the run")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto takes the GPUs where there are any"
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="number format of forward and backward; the weights stay fp32"
    )
    run: Run = Run()
    data: Data = Data()
    model: Model = Model()
    optim: Optim = Optim()
    parallel: Parallel = Parallel()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()

    def to_yaml(self) -> str:
        """The complete configuration as YAML, in the order of the schema."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)
