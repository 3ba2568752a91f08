"""Refuse keys that contradict each other or would have no effect, for any world size. No torch.

The model, the data and the world size are checked where these are known.
"""

import functools
import re
from collections.abc import Collection, Iterator

from rollcall.config.catalog import DATA_SETS, LOSSES
from rollcall.config.keys import on_resume
from rollcall.config.mesh import DIMENSIONS, PRESETS, parse
from rollcall.config.schema import Config, ConfigError, OnResume, Profile

DATA_KEYS = {
    "seq_len": ("text", "tokens", "synthetic_tokens"),
    "image_size": ("folder", "synthetic_images"),
    "num_samples": ("synthetic_images", "synthetic_tokens"),
}
"""Keys that only some of the data sets use; commands of several runs give data.path to all."""
DATA_PATHS = {
    "folder": "a directory with a directory of images for each class, or train/ and val/ of such",
    "jsonl": "files with one JSON object a line",
    "tokens": "a directory with train.bin and val.bin, as `rollcall tokenize` writes them",
}
"""The meaning of data.path for the data sets that need it."""
DATA_PARTS = {"folder": "*/", "tokens": "train.*"}
"""A pattern of what such a directory holds at least."""
WEIGHTS = (
    "a .safetensors file, a .pt, .pth or .bin file of torch.save, a folder of Hugging Face, or a "
    "run or one of its checkpoints"
)
"""The meaning of model.init."""
DDP_KEYS = "parallel.bucket_mb parallel.compression"
PIPELINE_KEYS = "parallel.schedule parallel.balance"
SYNC_KEYS = (
    "parallel.sync_every parallel.sync_compression parallel.sync_fragments parallel.sync_overlap"
)
OUTER_KEYS = "parallel.outer_lr parallel.outer_momentum"
INIT_KEYS = "model.init_rename model.init_random checkpoint.save_frozen"
EXPERT_KEYS = (
    "model.top_k model.expert_size model.expert_capacity model.shared_experts model.balance_rate "
    "model.balance_loss model.router_z_loss model.dense_layers model.router_scores "
    "model.routed_scale"
)
V_SHAPED = ("zbv", "dualpipev")
"""Schedules whose stages run over the ranks and back: the first rank also has the last stage."""
SPLIT_BACKWARD = ("zero-bubble", *V_SHAPED)
"""Schedules that compute the gradients of inputs first, and of weights later."""
LOOPED = ("interleaved", "breadth-first", *SPLIT_BACKWARD)
"""Schedules with several stages on each rank."""
FIGURES = ("loss", "accuracy", "top5", "perplexity")
"""Figures that an evaluation may have without the user's code."""


def check(config: Config, named: Collection[str] = ()) -> None:
    """Raise ConfigError for keys that cannot work, or that are `named` and would have no effect."""
    known = [name for name, rule in on_resume().items() if rule is OnResume.REFUSE]
    if wrong := [name for name in config.run.changes_allowed if name not in known]:
        raise ConfigError(f"run.allow_changes: expected {' or '.join(known)}, got '{wrong[0]}'")
    try:
        names = {*parse(config.parallel.mesh_text)}
    except ValueError as error:
        raise ConfigError(f"parallel.mesh={config.parallel.mesh}: {error}") from None
    _check_unused(config, named, names)
    _check_conflicts(config, names)
    _check_figures(config)
    _check_profile(config.profile)


def without_effect(config: Config, named: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each key that was named in vain: not refused, it may suit other runs."""
    data, steps, warmup = config.data, config.train.steps, config.optim.warmup_steps
    if "data.path" in named and data.name in {*DATA_SETS} - {"text", *DATA_PATHS}:
        yield f"data.path={data.path} has no effect on data.name={data.name}: remove it"
    if "train.epochs" in named and steps:
        yield f"train.epochs has no effect beside train.steps={steps}: add train.steps=null"
    if "optim.warmup_steps" in named and steps and warmup > steps:
        yield f"optim.warmup_steps={warmup} is more than train.steps={steps}: reduce it"


def _check_profile(profile: Profile) -> None:
    span = re.fullmatch(r"([1-9]\d*):(\d+)", profile.steps or "1:2")
    if not span or int(span[2]) <= int(span[1]):
        raise ConfigError(
            f"profile.steps={profile.steps}: expected FIRST:END with END after FIRST, counted from "
            "1, such as 10:13 for the steps 10 to 12"
        )
    if not re.fullmatch(r"all|\d+(,\d+)*", profile.ranks):
        raise ConfigError(f"profile.ranks={profile.ranks}: expected all, or ranks such as 0,5")


def _check_unused(config: Config, named: Collection[str], names: set[str]) -> None:
    """Refuse keys that only some runs use, if this one does not."""
    parallel, optim, model = config.parallel, config.optim, config.model
    has_fsdp = "shard" in names and parallel.stage > 1
    is_whole = not has_fsdp and not {"tensor", "pipeline", "expert"} & names
    has_ddp = is_whole and bool({"replicate", "shard", "context"} & names) and not config.exact
    is_apart, is_looped = parallel.sync != "step", parallel.schedule_name in LOOPED
    optimizers = optim.name, *(group.get("optimizer") for group in optim.groups.values())
    is_own, evaluates = config.data.name not in DATA_SETS, config.train.evaluate_every
    for keys, is_used, users, choice in (
        ("profile.ranks profile.tool", config.profile.steps, "profile.steps", "set profile.steps"),
        ("exact_shards log.fingerprints", config.exact, "exact mode", "set exact=true"),
        *(
            (f"data.{key}", is_own or config.data.name in users, ", ".join(users), "choose one")
            for key, users in DATA_KEYS.items()
        ),
        ("optim.momentum", "sgd" in optimizers, "optim.name=sgd", "choose sgd"),
        ("optim.decay_fraction", optim.schedule == "wsd", "optim.schedule=wsd", "choose wsd"),
        ("optim.evaluate_ema", optim.ema, "optim.ema", "set optim.ema, for example to 0.999"),
        (EXPERT_KEYS, model.experts, "experts", "set model.experts"),
        (INIT_KEYS, model.init, "model.init", "set model.init"),
        ("checkpoint.mirror", config.checkpoint.local, "checkpoint.local", "set checkpoint.local"),
        ("train.stop_after", evaluates, "evaluations", "set train.evaluate_every"),
        ("parallel.cpu_offload", has_fsdp, "zero2, zero3 and hsdp", "choose one of them"),
        (
            "parallel.reduce_scatter",
            has_fsdp and "pipeline" not in names,
            "zero2, zero3 and hsdp without a pipeline",
            "choose one of them",
        ),
        (DDP_KEYS, has_ddp and not is_apart, "ddp and zero1 without exact=true", "choose one"),
        (PIPELINE_KEYS, "pipeline" in names, "pipelines", "choose pipeline or split"),
        ("parallel.stages_per_rank", is_looped, ", ".join(LOOPED), "set parallel.schedule to one"),
        ("parallel.sequence_parallel", "tensor" in names, "tensor parallelism", "choose tensor"),
        (SYNC_KEYS, is_apart, "local-sgd and diloco", "set parallel.sync"),
        (OUTER_KEYS, parallel.sync == "diloco", "diloco", "set parallel.sync=diloco"),
    ):
        for key in () if is_used else keys.split():
            if _is_set(config, key) or key in {"optim.momentum"} & {*named}:
                raise ConfigError(
                    f"{key} is an option of {users}, which this run does not use; {choice}, or "
                    "remove the key"
                )


def _is_set(config: Config, key: str) -> bool:
    *sections, last = key.split(".")
    section = functools.reduce(getattr, sections, config)
    return bool(getattr(section, last) != type(section).model_fields[last].default)


def _check_figures(config: Config) -> None:
    best, watched = config.checkpoint.keep_best, config.train.stop_metric
    for key, metric in (("checkpoint.keep_best", best), ("train.stop_metric", watched)):
        if metric and not re.fullmatch(r"[^:]+(:max|:min)?", metric):
            expected = "expected the name of a figure, alone or with :max or :min"
            raise ConfigError(f"{key}={metric}: {expected}")
        name = (metric or "loss").partition(":")[0].rpartition("/")[2]  # of a validation set
        # The figures of the user's metrics and losses are known only when they are called.
        is_open = config.train.metrics or config.train.loss not in LOSSES.keys() - {"model"}
        if name not in FIGURES and not is_open:
            advice = f"choose {', '.join(FIGURES)} or add it to train.metrics"
            raise ConfigError(f"{key}={metric}: an evaluation has no such figure; {advice}")


def _check_conflicts(config: Config, names: set[str]) -> None:
    parallel, model, data, optim = config.parallel, config.model, config.data, config.optim
    is_apart, schedule = parallel.sync != "step", parallel.schedule_name
    splits, width = schedule in SPLIT_BACKWARD, 2 * model.num_heads
    cut = [name for name in DIMENSIONS if name in names & {"tensor", "pipeline", "context"}]
    has_groups = "replicate" in names and names <= {"replicate", "shard"} and parallel.stage > 1
    is_whole = parallel.strategy in ("single", "ddp") and names <= {"replicate"}
    micro, batch = data.micro_batch, data.global_batch
    counts = config.train.loss_args.get("counts")
    recomputes = model.activation_checkpointing != "none"
    on_mesh = (
        f"does not work on a mesh with {' and '.join(cut)}; choose ddp, zero1, zero2, zero3 or "
        "hsdp, or remove the key"
    )
    alone = (
        f"makes all replicas agree in every step, but with parallel.sync={parallel.sync} they meet "
        f"only every {parallel.sync_every} steps; remove one of the two keys"
    )
    separate = (
        "computes the gradients of inputs and weights together, but parallel.schedule="
        f"{schedule} computes them separately; choose parallel.schedule=interleaved"
    )
    goes_on, local = config.faults.on_lost_rank == "continue", config.checkpoint.local
    others = parallel.strategy != "ddp" or parallel.mesh or is_apart or config.exact or local
    only_ddp = "works only with ddp, without parallel.mesh, parallel.sync, exact, checkpoint.local"
    for key, is_conflict, reason in (
        ("faults.on_lost_rank=continue", goes_on and others, only_ddp),
        (
            "data.micro_batch=auto:",
            micro == "auto" and "pipeline" in names,
            "a pipeline is built for a size of micro-batches; set a number, or remove the key",
        ),
        (
            f"data.micro_batch={micro}",
            isinstance(micro, int) and micro > batch,
            f"is larger than data.global_batch={batch}; choose at most {batch}",
        ),
        ("data.pack", data.pack and data.pad, "and data.pad both make batches of rows; remove one"),
        (
            "data.pack",
            data.pack and data.collate,
            "and data.collate both make batches of rows; remove one",
        ),
        (
            "data.pack",
            data.pack and config.train.loss == "model" and counts not in ("next", "labels"),
            "with train.loss=model needs train.loss_args.counts: next if the model predicts each "
            "token from those before it, labels if not",
        ),
        (
            f"parallel.mesh={parallel.mesh}",
            parallel.mesh is not None and not PRESETS[parallel.strategy].mesh,
            f"is for several ranks, but parallel.strategy={parallel.strategy} is for one; remove "
            "one of the two",
        ),
        (
            "parallel.strategy=zero1",
            parallel.stage == 1 and {"tensor", "pipeline", "expert"} & names,
            "shards the optimizer of whole models, so the mesh cannot have tensor, pipeline or "
            "expert; choose zero2 or zero3",
        ),
        (
            f"parallel.sync={parallel.sync}",
            is_apart and not has_groups,
            f"needs replicas that can train alone, which {parallel.choice} does not have; choose "
            "ddp, hsdp, or a mesh such as replicate=2,shard=rest",
        ),
        (
            f"parallel.schedule={schedule}",
            schedule in V_SHAPED and parallel.stages_per_rank != 2,
            "has two stages on each rank, not "
            f"parallel.stages_per_rank={parallel.stages_per_rank}; remove the key",
        ),
        (
            f"parallel.schedule={schedule}",
            splits and "shard" in names and parallel.stage == 3,
            "computes the gradients of weights later than the gradients of inputs, so weights must "
            "stay gathered; choose parallel.strategy=zero2",
        ),
        (
            "exact=true",
            config.exact and not is_whole,
            "sums whole gradients in a fixed order, which does not work with "
            f"{parallel.choice}; choose parallel.strategy=ddp or single",
        ),
        (
            "optim.lr_scaling and optim.base_batch",
            (optim.lr_scaling == "none") != (optim.base_batch is None),
            "need each other: the learning rate is scaled with data.global_batch / "
            "optim.base_batch; set both or neither",
        ),
        (
            f"model.hidden_size={model.hidden_size}:",
            model.name in ("gpt", "llama") and model.hidden_size % width,
            f"expected a multiple of {width}, twice model.num_heads; choose "
            f"{-(-model.hidden_size // width) * width}",
        ),
        ("model.sync_batchnorm=true", model.sync_batchnorm and cut, on_mesh),
        ("model.channels_last=true", model.channels_last and cut, on_mesh),
        ("precision=fp8", config.precision == "fp8" and "tensor" in cut, on_mesh),
        ("exact=true", config.exact and is_apart, alone),
        ("precision=fp16", config.precision == "fp16" and is_apart, alone),
        ("model.experts", model.experts and is_apart, alone),
        ("model.sync_batchnorm=true", model.sync_batchnorm and is_apart, alone),
        ("model.sync_buffers", model.sync_buffers and is_apart, alone),
        ("train.gather=true", config.train.gather and is_apart, alone),
        ("faults.spike_factor", config.faults.spike_factor and is_apart, alone),
        ("model.activation_checkpointing", recomputes and splits, separate),
        ("train.compile", config.train.compile and splits, separate),
        (
            "data.micro_batch",
            micro is not None and config.exact,
            "has no effect with exact=true, where every virtual shard is one micro-batch; remove "
            "the key, or increase exact_shards for smaller micro-batches",
        ),
        (
            "train.compile=true",
            config.train.compile and parallel.strategy == "dp",
            "compiles for one GPU, but parallel.strategy=dp copies the model to several; choose "
            "ddp",
        ),
        (
            "parallel.sync_fragments",
            parallel.sync_fragments > parallel.sync_every,
            f"must not exceed parallel.sync_every={parallel.sync_every}, the steps of a round",
        ),
        (
            "parallel.sync_overlap",
            parallel.sync_overlap >= parallel.sync_every,
            f"must be below parallel.sync_every={parallel.sync_every}, after which the next "
            "message leaves",
        ),
    ):
        if is_conflict:
            raise ConfigError(f"{key} {reason}")
