"""Words of other frameworks: they are not accepted, but refused with rollcall's own. No torch."""

import re
from typing import Any

from rollcall.config.keys import describe

KEYS = {
    "batch_size train_batch_size total_batch_size effective_batch_size": "data.global_batch",
    "micro_batch_size per_device_batch_size per_device_train_batch_size local_batch_size "
    "gradient_accumulation_steps accumulate_grad_batches grad_accum": "data.micro_batch",
    "context_length block_size max_seq_len max_length sequence_length": "data.seq_len",
    "dataset dataset_name": "data.name",
    "data_dir data_path dataset_path": "data.path",
    "img_size resolution input_size": "data.image_size",
    "vocab_size n_classes": "data.num_classes",
    "workers dataloader_num_workers n_workers": "data.num_workers",
    "arch architecture model_name": "model.name",
    "d_model hidden_dim embed_dim n_embd dim": "model.hidden_size",
    "depth n_layer n_layers": "model.num_layers",
    "n_head n_heads": "model.num_heads",
    "gradient_checkpointing checkpoint_activations": "model.activation_checkpointing",
    "sync_bn": "model.sync_batchnorm",
    "optimizer optimizer_name": "optim.name",
    "lr learning_rate base_lr max_lr": "optim.lr",
    "wd l2": "optim.weight_decay",
    "scheduler lr_scheduler lr_scheduler_type": "optim.schedule",
    "warmup num_warmup_steps warmup_iters": "optim.warmup_steps",
    "grad_clip clip_grad clip_grad_norm gradient_clip_val max_grad_norm": "optim.clip_norm",
    "ema_decay use_ema": "optim.ema",
    "epoch max_epochs num_epochs num_train_epochs": "train.epochs",
    "max_steps num_steps total_steps training_steps max_iters": "train.steps",
    "eval_every eval_interval val_check_interval check_val_every_n_epoch": "train.evaluate_every",
    "criterion loss_fn": "train.loss",
    "torch_compile": "train.compile",
    "amp use_amp fp16 bf16 mixed_precision dtype": "precision",
    "accelerator": "device",
    "seed_everything random_seed manual_seed": "seed",
    "deterministic": "exact",
    "distributed_strategy zero_stage fsdp ddp": "parallel.strategy",
    "tp tp_size tensor_parallel_size pp pp_size pipeline_parallel_size cp dp": "parallel.mesh",
    "save_every save_steps save_interval checkpoint_every": "checkpoint.every",
    "save_total_limit save_last": "checkpoint.keep_last",
    "save_top_k load_best_model_at_end": "checkpoint.keep_best",
    "logging_steps log_every log_interval log_every_n_steps": "log.every",
    "run_name experiment experiment_name exp_name": "run.name",
    "output_dir out_dir save_dir log_dir work_dir default_root_dir": "run.root",
    "resume resume_from_checkpoint ckpt_path": "run.name",
}
"""Names of a key in other frameworks, and the key here."""

ELSEWHERE = {
    "nodes num_nodes nnodes": "`rollcall submit --nodes N` or `torchrun --nnodes N` sets the nodes",
    "gpus num_gpus ngpus devices nproc_per_node world_size": (
        "`rollcall submit --gpus-per-node N` or `torchrun --nproc_per_node=N` sets the ranks"
    ),
    "rank local_rank master_addr master_port backend": "the launcher sets it",
    "shuffle drop_last": "every epoch is shuffled, and every sample counts once",
    "pin_memory": "batches for GPUs are always pinned",
    "partition account time qos": "it is an option of `rollcall submit`",
}
"""Names that are not keys here, and what to do instead."""

FSDP = "PyTorch's FSDP is zero3 (fully sharded) or zero2 (gradients and optimizer state)"
DEEPSPEED = "the stages 1, 2 and 3 of DeepSpeed's ZeRO are zero1, zero2 and zero3"
VALUES = {
    "parallel.strategy": {
        "fsdp fsdp1 fsdp2 fsdp_native fully_sharded": FSDP,
        "full_shard": "FSDP's FULL_SHARD is zero3",
        "shard_grad_op": "FSDP's SHARD_GRAD_OP is zero2",
        "hybrid_shard": "FSDP's HYBRID_SHARD is hsdp",
        "no_shard ddp_spawn ddp_notebook horovod data_parallel distributed": "use ddp",
        "deepspeed deepspeed_stage_1 deepspeed_stage_2 deepspeed_stage_3 zero": DEEPSPEED,
        "ddp_sharded oss zero_redundancy": "a sharded optimizer is zero1",
        "tp tensor_parallel megatron": "use tensor, or pipeline for stages of layers",
        "pp pipeline_parallel gpipe": "use pipeline",
        "cp sp ulysses ring sequence_parallel context_parallel": "use context",
        "model_parallel naive": "use split",
        "none off auto": "use single for one rank, ddp for several",
    },
    "precision": {
        "32 32-true float float32 full": "use fp32",
        "bfloat16 bf16-mixed bf16-true mixed": "use bf16; the weights stay fp32",
        "16 16-mixed 16-true half float16 amp": "use fp16, or bf16, which needs no loss scaling",
        "8 float8 transformer-engine": "use fp8",
        "64 64-true double float64": "fp32 is the most precise format here",
    },
    "device": {
        "gpu nvidia rocm hip": "use cuda, PyTorch's name for GPUs, or auto",
        "cuda:n": "use cuda; each rank takes its own GPU (CUDA_VISIBLE_DEVICES selects them)",
        "mps metal xpu tpu xla hpu": "only CPUs and CUDA GPUs are supported; use cpu",
    },
    "optim.schedule": {
        "none": "use constant",
        "cosine_annealing cosineannealinglr": "use cosine, and optim.warmup_steps for a warm-up",
        "onecycle step multistep exponential polynomial": "use cosine, linear or wsd",
    },
}
"""For each key: values in other frameworks, and what to use here."""


def about_key(name: str) -> str:
    """Return what to use instead of another framework's key; an empty text if it is unknown."""
    word = name.rpartition(".")[2].lower().replace("-", "_")
    if key := _find(KEYS, word):
        meaning = next(item.meaning for item in describe() if item.name == key)
        first = meaning.partition(". ")[0].rstrip(".")
        return f"use {key} ({first[0].lower()}{first[1:]})"
    return _find(ELSEWHERE, word)


def about_value(key: str, value: Any) -> str:
    """Return what to use instead of another framework's value; an empty text if it is unknown."""
    if not isinstance(value, str | int | float):  # YAML's aliases make endless texts of few lines
        return ""
    return _find(VALUES.get(key, {}), re.sub(r":\d+$", ":n", str(value).lower()))


def _find(table: dict[str, str], word: str) -> str:
    return next((answer for words, answer in table.items() if word in words.split()), "")
