"""Data sets, models, optimizers and losses that rollcall ships: their names and code. No torch.

To add one, write its file and add a line here. The code is named as users name their own.
"""

DATA_SETS = {
    "digits": "rollcall.train.data.sets.digits:digits",
    "mnist": "rollcall.train.data.sets.vision:mnist",
    "fashionmnist": "rollcall.train.data.sets.vision:fashionmnist",
    "cifar10": "rollcall.train.data.sets.vision:cifar10",
    "cifar100": "rollcall.train.data.sets.vision:cifar100",
    "folder": "rollcall.train.data.sets.folder:folder",
    "text": "rollcall.train.data.sets.text:text",
    "jsonl": "rollcall.train.data.sets.jsonl:jsonl",
    "tokens": "rollcall.train.data.sets.tokens:tokens",
    "synthetic_images": "rollcall.train.data.sets.synthetic:synthetic_images",
    "synthetic_tokens": "rollcall.train.data.sets.synthetic:synthetic_tokens",
}
"""Functions `(config.data, world) -> Source`."""

MODELS = {
    "cnn": "rollcall.train.models.cnn:cnn",
    "mlp": "rollcall.train.models.mlp:mlp",
    "gpt": "rollcall.train.models.gpt:gpt",
    "llama": "rollcall.train.models.llama:llama",
    "transformers": "rollcall.train.models.huggingface:transformers",
}
"""Functions `(config.model, source) -> nn.Module`. The models of torchvision need no entry."""

OPTIMIZERS = {
    "sgd": "torch.optim:SGD",
    "adam": "torch.optim:Adam",
    "adamw": "torch.optim:AdamW",
}
"""Classes `(params, lr, weight_decay, …)`. The other classes of torch.optim need no entry."""

SCHEDULES = {
    "constant": "rollcall.train.numerics.schedules:constant",
    "cosine": "rollcall.train.numerics.schedules:cosine",
    "linear": "rollcall.train.numerics.schedules:linear",
    "wsd": "rollcall.train.numerics.schedules:wsd",
}
"""Functions `(step, steps)` after the warm-up that return the fraction of the peak rate."""

LOSSES = {
    "cross_entropy": "rollcall.train.numerics.losses:per_sample_loss",
    "mse": "rollcall.train.numerics.losses:squared_error",
    "next_token": "rollcall.train.numerics.losses:per_sample_loss",
    "model": "rollcall.train.numerics.model_loss:ModelLoss",
}
"""Functions `(outputs, targets)` of some samples that return the loss of each: (rows,).

Or a pair: the sum of the losses of each sample, and the sum of their weights.
"""

LOGGERS = {
    "tensorboard": "rollcall.train.loggers.tensorboard:TensorBoard",
    "wandb": "rollcall.train.loggers.wandb:Wandb",
    "mlflow": "rollcall.train.loggers.mlflow:MLflow",
}
"""Classes `(run, …)` with a method `logged(step, values)`, made on rank 0 only."""
