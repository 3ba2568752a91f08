"""Every configuration key, with its type and default, and its meaning below it. No torch.

`--help`, `recipes/schema.json` and the reference page are generated from it; keys.py reads the
meanings, in which `$MODELS` is replaced by the names in that table of catalog.yaml.
"""

from __future__ import annotations

import enum
import os
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

# Searching all installed packages for pydantic plugins takes a sixth of the start of a command.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from rollcall.config import yaml_values
from rollcall.config.mesh import PRESETS, fit
from rollcall.messages.refusal import ConfigError as ConfigError

if TYPE_CHECKING:
    Strategy = str
else:
    Strategy = Literal[tuple(PRESETS)]
Schedule = Literal[
    "1f1b", "gpipe", "interleaved", "breadth-first", "zero-bubble", "zbv", "dualpipev", "sequential"
]


class OnResume(enum.Enum):
    """The effect of resuming a run with another value of a key."""

    TELL = "say that it continues with another value"
    IGNORE = "nothing: the value does not change the result, or only by rounding"
    REFUSE = "refuse, unless run.allow_changes names the key: it changes the order of the samples"


class Section(BaseModel):
    """A group of keys. Unknown keys are refused, and values cannot change after the check."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, allow_inf_nan=False)
    ON_RESUME: ClassVar[OnResume] = OnResume.TELL  # for keys that do not say it themselves

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_other_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and is_number(kind):
            raise PydanticCustomError("not_a_number", "expected a number")
        is_long = isinstance(value, int) and abs(value) >= 2**63  # C code could not take it
        if is_long and float not in _types(kind) and info.field_name != "seed":
            raise PydanticCustomError("less_than", "too large", {"lt": 2**63})
        return value


def is_number(kind: Any) -> bool:
    """Return True for a type with numbers but not booleans, which pydantic converts to 1 and 0."""
    parts = _types(kind)
    return bool not in parts and (int in parts or float in parts)


def _types(kind: Any) -> list[Any]:
    parts = [kind, *get_args(kind)]
    return parts + [part for union in parts[1:] for part in get_args(union)]


def _key(default: Any, on_resume: OnResume | None = None, **limits: Any) -> Any:
    field = Field(default=default, **limits)
    field.metadata += [on_resume] if on_resume else []
    return field


class Plugin(Section):
    """Code that an entry names, and its arguments."""

    name: str = _key("", min_length=1)
    """Short name, or package.module:attribute."""
    args: dict[str, Any] = {}
    """Its arguments."""


def entries(value: Any) -> Any:
    """Read `a,b`, a list of names, or a mapping of entries; the name of an entry is optional."""
    if isinstance(value, str):
        value = [word.strip() for word in value.split(",")]
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        names = [word.rpartition(":")[2].rpartition(".")[2] for word in value]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"names that differ, such as {{first: a:{twice}, second: b:{twice}}}")
        value = dict(zip(names, value, strict=True))
    if not isinstance(value, dict):
        return value
    named = {}
    for key, entry in value.items():
        entry = {"name": entry} if isinstance(entry, str) else entry
        is_open = entry is None or isinstance(entry, dict)
        named[key] = {"name": key, **(entry or {})} if is_open else entry
    return named


Plugins = Annotated[dict[str, Plugin], BeforeValidator(entries)]
"""Entries by name, each with code and arguments."""


class Run(Section):
    """The name and directory of the run."""

    ON_RESUME = OnResume.IGNORE

    name: str | None = _key(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Name of the run and of its directory. Starting again with the same name resumes the run.
    Default: recipe, date and time."""
    root: str = _key("runs", min_length=1)
    """Directory that contains the runs."""
    allow_changes: str | None = _key(None, min_length=1)
    """Comma-separated keys that may have other values than before when the run is resumed, although
    they change the order of the samples: seed, data.global_batch. The samples of the running epoch
    are still seen once."""

    trust: str | None = _key(None, min_length=1)
    """Comma-separated packages and directories whose code a recipe or run may name. It counts only
    when typed. A line in ~/.config/rollcall/trusted trusts one for all runs (docs/security.md)."""

    @property
    def changes_allowed(self) -> list[str]:
        """The keys of `allow_changes`."""
        return [name.strip() for name in (self.allow_changes or "").split(",") if name.strip()]


class Data(Section):
    """The data set, the batch and how samples are read."""

    name: str = "digits"
    """Data set: $DATA_SETS, or your own as package.module:attribute (docs/data.md)."""
    args: dict[str, Any] = {}
    """Arguments of your own data set. It also receives `config`, this section, and `world`, if it
    has parameters of these names."""
    root: str = _key("datasets", min_length=1, on_resume=OnResume.IGNORE)
    """Directory of downloaded data, shared by all ranks."""
    path: str | None = None
    """Location of your data. For folder: a directory with one directory per class; for tokens: a
    directory with train.bin and val.bin; for text and jsonl: comma-separated files, directories or
    patterns."""
    seq_len: int = _key(128, ge=1)
    """Sequence length: bytes or tokens per sample."""
    num_classes: int | None = _key(None, ge=1)
    """Size of the vocabulary of tokens (default: found by reading the files once), or number of
    classes of the synthetic data sets."""
    image_size: int = _key(224, ge=1)
    """Height and width of images in pixels, for folder and synthetic_images."""
    num_samples: int = _key(10_000, ge=1)
    """Number of training samples of the synthetic data sets."""
    augment: bool = False
    """Train on random crops and mirror images, for cifar10, cifar100 and folder."""
    global_batch: int = _key(64, ge=1, on_resume=OnResume.REFUSE)
    """Number of samples per step, over all ranks."""
    micro_batch: Literal["auto"] | Annotated[int, Field(ge=1)] | None = _key(None, OnResume.IGNORE)
    """Number of samples per forward and backward pass on one rank. Gradients accumulate over the
    micro-batches of a step. auto tries which ones fit into memory before the first step, and takes
    the fastest; the run keeps it. Default: the rank's whole share of the global batch."""
    target: str | None = _key(None, min_length=1)
    """Key of the target in samples that are dictionaries. Default: labels, label, targets or
    target, whichever a sample has."""
    pad: bool | Annotated[int, Field(ge=1, strict=True)] = False
    """Pad rows of unequal length: true to the longest of a batch, a number to this length. Padding
    does not count in the loss."""
    pack: int | None = _key(None, ge=1)
    """Put several rows of unequal length into one sequence of this length, instead of data.pad. The
    model receives `position_ids`, from 0 in each row; rows do not attend to each other.
    data.global_batch then counts sequences."""
    mask: str | None = "attention_mask"
    """With data.pad, name of the model's argument that receives ones where a row has content;
    without names it is the last argument. null passes no mask."""
    collate: str | None = None
    """Your own function that makes a batch of a list of samples, as package.module:attribute."""
    num_workers: int = _key(0, ge=0, on_resume=OnResume.IGNORE)
    """Number of processes per rank that read samples ahead; 0 reads in the rank itself."""
    prefetch_factor: int = _key(2, ge=1, on_resume=OnResume.IGNORE)
    """Number of batches that each worker reads ahead."""
    skip_unreadable: int = _key(0, ge=0, on_resume=OnResume.IGNORE)
    """Number of unreadable samples per epoch, over all ranks, that are skipped before the run
    stops."""


class Model(Section):
    """The model and its size."""

    name: str = "cnn"
    """Model: $MODELS, a classification model of torchvision such as resnet18 or vit_b_16, or your
    own as package.module:attribute."""
    args: dict[str, Any] = {}
    """Arguments of your own model. It also receives `config`, this section, and `source`, the data
    set, if it has parameters of these names."""
    size: Literal["1b", "3b", "8b", "70b", "405b"] | None = None
    """Shape of a Llama 3: numbers for the keys from hidden_size to tied that you do not set."""
    hidden_size: int = _key(128, ge=1)
    """Width of the hidden layer, or of the blocks of gpt and llama."""
    num_layers: int = _key(4, ge=1)
    """Number of blocks of gpt and llama."""
    num_heads: int = _key(4, ge=1)
    """Number of attention heads of gpt and llama."""
    num_kv_heads: int = _key(2, ge=1)
    """Number of key and value heads of gpt and llama, shared by groups of attention heads."""
    ffn_size: int | None = _key(None, ge=1)
    """Inner width of the perceptrons of gpt and llama. Default: 4 times model.hidden_size."""
    norm_eps: float | None = _key(None, gt=0)
    """Added to the mean square in the norms of gpt and llama. Default: the machine epsilon."""
    rope_theta: float = _key(10_000.0, gt=0)
    """Base of the wavelengths of the rotary positions of gpt and llama."""
    rope_scaling: dict[str, float] = {}
    """Lengthening of the longest waves of these positions as in Llama 3.1, by the names of its
    config.json: factor, low_freq_factor, high_freq_factor, original_max_position_embeddings."""
    tied: bool = False
    """Let the head of gpt or llama have the weights of the embedding."""
    experts: int = _key(0, ge=0)
    """Number of experts in each block of gpt, of which a token passes only model.top_k; 0 for one
    perceptron that all tokens pass."""
    top_k: int = _key(2, ge=1)
    """Number of experts that a token passes."""
    expert_size: int | None = _key(None, ge=1)
    """Hidden units of an expert. Default: model.ffn_size, or 4 times
    model.hidden_size."""
    expert_capacity: float = _key(0.0, ge=0)
    """How many tokens of a sequence an expert takes in training, times the mean, such as 1.25; the
    later ones do not pass it. 0: all."""
    shared_experts: int = _key(0, ge=0)
    """Number of experts that every token passes beside its own."""
    dense_layers: int = _key(0, ge=0)
    """Number of first blocks without experts."""
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    """Function that makes scores of the outputs of the router of experts."""
    routed_scale: float = _key(1.0, gt=0)
    """Factor of what the chosen experts add, beside the shared ones."""
    balance_rate: float = _key(1e-3, ge=0)
    """How far the bias of an expert moves in a step, so that all get the same number of tokens; 0
    turns the balance off."""
    balance_loss: float = _key(0.0, ge=0)
    """Weight of a loss that grows with uneven loads of experts within a sequence."""
    router_z_loss: float = _key(0.0, ge=0)
    """Weight of a loss that grows with the outputs of the router of experts."""
    dropout: float = _key(0.0, ge=0, lt=1)
    """Probability that dropout zeroes a hidden unit."""
    init: str | None = _key(None, min_length=1, on_resume=OnResume.IGNORE)
    """Weights to start from: a safetensors or torch.save file, a folder of Hugging Face, or a run
    (its best checkpoint). Read only by a new run. Default: random numbers."""
    init_rename: str | None = _key(None, on_resume=OnResume.IGNORE)
    """Comma-separated rules old=new for the names of stored tensors, with at most one * on each
    side, such as backbone.*=encoder.*."""
    init_random: str | None = _key(None, on_resume=OnResume.IGNORE)
    """Comma-separated patterns of tensors that keep their random numbers if model.init misses them
    or has them in another shape, such as head.*."""
    freeze: str | None = None
    """Comma-separated patterns of parameters that are not trained, such as encoder.*."""
    activation_checkpointing: Literal["none", "blocks", "selective"] = _key("none", OnResume.IGNORE)
    """Activations kept for the backward pass: none means all of them; blocks only the inputs of
    blocks; selective also the results of matrix multiplications, convolutions and attention. The
    rest is recomputed."""
    sync_batchnorm: bool = False
    """Compute the statistics of BatchNorm over all ranks."""
    sync_buffers: dict[str, Literal["mean", "sum"]] = {}
    """Buffers, by patterns of their names, that forward() changes by the samples that it sees, and
    how their changes of a step add up over the ranks, such as {norm.mean: mean}."""
    channels_last: bool = _key(False, on_resume=OnResume.IGNORE)
    """Store images in channels-last memory format, which is faster for convolutions on GPUs."""


class Optim(Section):
    """The optimizer and the learning rate."""

    name: str = "adamw"
    """Optimizer: $OPTIMIZERS, a class of torch.optim such as Muon, or your own as
    package.module:attribute."""
    args: dict[str, Any] = {}
    """Further arguments of the optimizer, such as betas or eps. It also receives `params`, and `lr`
    and `weight_decay` from this section."""
    lr: float = _key(1e-3, gt=0)
    """Peak learning rate."""
    implementation: Literal["auto", "fused", "foreach", "single"] = _key("auto", OnResume.IGNORE)
    """Kernels of the update: fused uses one for everything, foreach one per operation, single one
    per tensor; auto is fused on GPUs and for adam and adamw, else PyTorch's default."""
    weight_decay: float = _key(0.0, ge=0)
    """Weight decay; decoupled for adamw, an L2 penalty otherwise."""
    decay_params: Literal["all", "matrices"] = "all"
    """Parameters with weight decay; matrices excludes norms and biases."""
    groups: dict[str, dict[str, Any]] = {}
    """Options of the weights whose names fit a pattern; the first that fits counts, such as
    {"*.bias": {weight_decay: 0}, "head.*": {lr: 1e-2}}. `optimizer` names another optimizer for
    them."""
    momentum: float = _key(0.9, ge=0, lt=1)
    """Momentum of sgd."""
    schedule: str = "constant"
    """Learning rate after the warm-up: $SCHEDULES, or your own as package.module:attribute. cosine
    and linear decay until the end; wsd (warm-up, stable, decay) stays constant and decays in the
    last steps."""
    schedule_args: dict[str, Any] = {}
    """Arguments of your own schedule; it receives `step` and `steps`, counted after the warm-up,
    and returns the fraction of the peak rate."""
    min_lr_ratio: float = _key(0.0, ge=0, le=1)
    """Fraction of the peak rate to which cosine, linear and wsd decay."""
    decay_fraction: float = _key(0.2, gt=0, le=1)
    """Fraction of the steps, at the end, in which schedule=wsd decays."""
    warmup_steps: int = _key(0, ge=0)
    """Number of steps of linear warm-up from zero."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scaling of the learning rate with data.global_batch / optim.base_batch."""
    base_batch: int | None = _key(None, ge=1)
    """Global batch for which optim.lr was tuned; used by optim.lr_scaling."""
    clip_norm: float | None = _key(None, gt=0)
    """Maximum norm of the whole gradient, to which it is clipped. Default: no clipping."""
    ema: float | None = _key(None, gt=0, lt=1)
    """Decay per step of an exponential moving average of the weights, which checkpoints include.
    Set it from step 0; it cannot be added on resume. Default: no average."""
    evaluate_ema: bool = False
    """Evaluate the moving average of the weights instead of the weights."""


class Train(Section):
    """The length of the training, evaluation and the loss."""

    epochs: float = _key(10, gt=0)
    """Number of passes over the training data."""
    steps: int | None = _key(None, ge=1)
    """Number of steps to train; overrides train.epochs."""
    evaluate_every: float | None = _key(None, gt=0, on_resume=OnResume.IGNORE)
    """Number of epochs between evaluations. Default: only at the end."""
    loss: str = "cross_entropy"
    """Loss: $LOSSES, or your own as package.module:attribute."""
    stop_after: int | None = _key(None, ge=1)
    """Stop early after this number of evaluations in a row in which train.stop_metric did not
    improve."""
    stop_metric: str = _key("loss", min_length=1)
    """Validation metric of train.stop_after, as in checkpoint.keep_best."""
    loss_args: dict[str, Any] = {}
    """Arguments of your own loss; it receives `outputs` and `targets`, or `model` and `batch`."""
    gather: bool = False
    """Give the loss the outputs and targets of all ranks and micro-batches at once, for losses in
    which samples depend on each other, such as contrastive ones."""
    metrics: Plugins = _key({}, on_resume=OnResume.IGNORE)
    """Metrics of your own, as package.module:attribute or by name: {name: …, args: …}. Each
    receives `outputs` and `targets` of a validation batch."""
    callbacks: Plugins = {}
    """Members of the training step of your own, like train.metrics. Each receives `run` and
    `model`."""
    compile: bool = _key(False, on_resume=OnResume.IGNORE)
    """Compile each block of the model."""


class Faults(Section):
    """Non-finite losses, loss spikes, hangs and diverging replicas."""

    ON_RESUME = OnResume.IGNORE

    max_skipped_steps: int = _key(10, ge=1)
    """Number of consecutive steps that may be skipped because the loss or gradient is not
    finite."""
    on_repeated: Literal["rollback", "stop"] = "stop"
    """Action after that: rollback returns to the last checkpoint and skips the bad batches; stop
    ends the run."""
    spike_factor: float | None = _key(None, gt=1, on_resume=OnResume.TELL)
    """Skip a step whose loss is more than this multiple of the recent mean; needs one more
    collective per step. Set it from step 0; it cannot be added on resume. Default: off."""
    hang_seconds: Literal["auto"] | float | None = "auto"
    """Seconds without progress after which all ranks print their stacks and end; auto is ten times
    the longest step so far, at least 300; null turns it off."""
    divergence: Literal["warn", "stop", "off"] = "warn"
    """Action if ranks that should hold the same weights do not."""
    on_lost_rank: Literal["restart", "continue"] = "restart"
    """Action if a signal ends a rank: restart all, or continue without it until it is replaced."""


class Parallel(Section):
    """How the model is spread over the ranks."""

    ON_RESUME = OnResume.IGNORE

    strategy: Strategy = "ddp"
    """single: one rank; dp: the GPUs of one process; ddp: a replica on each rank; zero1, zero2,
    zero3: shard the optimizer state, also the gradients, also the weights; hsdp: shards inside a
    node, replicas between nodes; tensor: split layers; context: split sequences; pipeline: stages
    of layers; split: like pipeline, but one micro-batch at a time, also over the GPUs of one
    process."""
    mesh: str | None = None
    """Mesh of ranks that replaces the strategy's own, such as shard=rest,tensor=2
    (docs/parallelism.md)."""
    schedule: Schedule | None = None
    """Order in which micro-batches run through pipeline stages. Default: 1f1b, or sequential for
    strategy=split."""
    stages_per_rank: int = _key(2, ge=2)
    """Number of pipeline stages per rank, for the schedules interleaved to dualpipev."""
    balance: Literal["flops", "time"] = "flops"
    """Cost by which layers are divided into pipeline stages: counted operations or measured
    time."""
    conditional: str | None = None
    """Comma-separated patterns of weights that zero2, zero3 and hsdp keep whole on each rank, such
    as experts.*, because some samples do not use them."""
    sequence_parallel: bool = False
    """With tensor parallelism, compute norms and other modules between the split layers on pieces
    of the sequences."""
    cpu_offload: bool = False
    """Keep shards in host memory and update them on the CPU."""
    reduce_scatter: Literal["step", "micro-batch"] = "step"
    """When zero2, zero3 and hsdp add up gradients: step keeps whole gradients on each rank until
    its last micro-batch; micro-batch sends them after each, and keeps shards."""
    bucket_mb: float | None = _key(None, gt=0)
    """MiB of gradients per all-reduce of ddp. Default: PyTorch's."""
    compression: Literal["none", "fp16", "bf16", "powersgd"] = _key("none", on_resume=OnResume.TELL)
    """Compression of the gradients that ddp sends. It changes the result."""
    sync: Literal["step", "local-sgd", "diloco"] = _key("step", on_resume=OnResume.TELL)
    """When replicas exchange what they learned: step averages the gradients of every step;
    local-sgd and diloco let replicas train alone for parallel.sync_every steps, then average their
    weights, diloco with an outer optimizer (docs/seldom.md)."""
    sync_every: int = _key(500, ge=1, on_resume=OnResume.TELL)
    """Number of steps that replicas train alone."""
    sync_compression: Literal["none", "bf16", "int4"] = _key("none", on_resume=OnResume.TELL)
    """Format in which they send the change of their weights. It changes the result."""
    sync_fragments: int = _key(1, ge=1, on_resume=OnResume.TELL)
    """Fragments of the weights that are sent one after the other, spread over the steps of a
    round."""
    sync_overlap: int = _key(0, ge=0, on_resume=OnResume.TELL)
    """Steps that replicas take while a fragment travels. Its mean is then mixed with their own
    weights, half and half."""
    outer_lr: float = _key(0.7, gt=0, on_resume=OnResume.TELL)
    """Learning rate of the outer optimizer of diloco, SGD with Nesterov momentum."""
    outer_momentum: float = _key(0.9, ge=0, lt=1, on_resume=OnResume.TELL)
    """Its momentum."""
    check: Literal["auto", "warn", "off"] = "auto"
    """Before the first step, check that the ranks together compute what one would: auto refuses the
    run if not, warn prints a warning (docs/checks.md)."""

    @property
    def choice(self) -> str:
        """The key that chooses the mesh and its value, for messages."""
        key = f"strategy={self.strategy}" if self.mesh is None else f"mesh={self.mesh}"
        return f"parallel.{key}"

    @property
    def mesh_text(self) -> str:
        """The mesh as text: the configured one, or the strategy's default."""
        return PRESETS[self.strategy].mesh if self.mesh is None else self.mesh

    @property
    def conditional_patterns(self) -> list[str]:
        """The patterns of weights that stay whole."""
        return (self.conditional or "").replace(",", " ").split()

    @property
    def schedule_name(self) -> str:
        """The schedule of pipeline stages: the configured one, or the strategy's default."""
        return self.schedule or PRESETS[self.strategy].schedule

    @property
    def stage(self) -> int:
        """The stage of ZeRO: 1 shards the optimizer state, 2 also gradients, 3 also weights."""
        return PRESETS[self.strategy].stage

    def degrees(self, world_size: int, node_size: int) -> dict[str, int]:
        """Return the degrees of the mesh; raise ConfigError if it does not fit these ranks."""
        try:
            return fit(self.mesh_text, world_size, node_size)
        except ValueError as error:
            raise ConfigError(f"{self.choice} {error}") from None


class Checkpoint(Section):
    """When checkpoints are saved, and which are kept."""

    ON_RESUME = OnResume.IGNORE

    every: int | None = _key(100, ge=1)
    """Number of steps between checkpoints; null saves only by time, at the end and on a stop."""
    every_minutes: float | None = _key(None, gt=0)
    """Minutes between checkpoints, in addition to those by steps."""
    keep_last: int = _key(2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_every: int | None = _key(None, ge=1)
    """Keep also the checkpoints of steps that are multiples of this."""
    keep_best: str | None = _key(None, min_length=1)
    """Keep also the checkpoint with the best value of this validation metric, such as loss,
    accuracy or one of train.metrics; it is saved at evaluations (train.evaluate_every). Losses,
    errors and perplexity are best when small, others when large; loss:max and NAME:min say so."""
    save_frozen: bool = True
    """Save also the parameters that are not trained; with false, a resumed run reads them from
    model.init again."""
    local: str | None = _key(None, min_length=1)
    """Directory on a local disk of each node, such as $TMPDIR. Checkpoints are written there first
    and copied to the run directory in the background."""
    mirror: bool = False
    """Copy each node's local checkpoint to the next node, too. A host that takes the place of a
    lost one gets its part from there, even if no replica has it. Needs checkpoint.local."""


class Log(Section):
    """Metrics, loggers and fingerprints."""

    ON_RESUME = OnResume.IGNORE

    every: int = _key(10, ge=1)
    """Number of steps between lines of metrics.jsonl."""
    to: Plugins = {}
    """Loggers, comma-separated: $LOGGERS, or your own as package.module:attribute. Arguments are
    log.to.NAME.args. Each receives `run`."""
    chips: str | None = _key(None, min_length=1)
    """YAML file with the peak operations per second of your chips, for `mfu`; it adds to
    rollcall/config/chips.yaml (docs/profiling.md)."""
    fingerprints: bool = False
    """Write a hash of every tensor of every step to fingerprints.jsonl; needs exact=true."""


class Profile(Section):
    """A profile of a few steps; `rollcall profile RUN` asks a live run for one."""

    ON_RESUME = OnResume.IGNORE

    steps: str | None = None
    """Steps to profile, FIRST:END as in Python: 10:13 profiles the steps 10, 11 and 12. The trace
    and tables lie in RUN/profile (docs/profiling.md)."""
    ranks: Annotated[str, BeforeValidator(lambda ranks: f"{ranks}")] = "0"
    """Comma-separated ranks that are profiled, or all."""
    tool: Literal["torch", "nsight"] = "torch"
    """torch writes a trace and tables; nsight only marks the phases and the steps, for a run under
    Nsight Systems on GPUs."""


class Config(Section):
    """The complete configuration of a run."""

    seed: int = _key(0, ge=0, lt=2**63, on_resume=OnResume.REFUSE)
    """Seed of all random numbers of the run."""
    device: Literal["auto", "cpu", "cuda"] = _key("auto", on_resume=OnResume.IGNORE)
    """Device type; auto uses the GPUs if there are any."""
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp8"] = "fp32"
    """Number format of the forward and backward pass; the weights stay fp32 (docs/training.md)."""
    exact: bool = False
    """Make the weights bit-identical for any number of ranks that divides exact_shards
    (docs/exact.md)."""
    exact_shards: Literal[2, 4, 8, 16, 32, 64, 128, 256] = 8
    """Number of pieces of the global batch in exact mode; the result depends on it."""
    run: Run = Run()
    data: Data = Data()
    model: Model = Model()
    optim: Optim = Optim()
    parallel: Parallel = Parallel()
    train: Train = Train()
    faults: Faults = Faults()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    profile: Profile = Profile()

    def to_yaml(self) -> str:
        """Return the complete configuration as YAML, in the order of the schema."""
        return yaml_values.dump(self.model_dump())
