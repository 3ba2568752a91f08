"""`rollcall generate RUN --prompt TEXT`: continue a text with a trained transformer."""

import argparse
import codecs
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rollcall.config import Config, ConfigError
from rollcall.refusal import refuse
from rollcall.run_dir import RunDir
from rollcall.train.inference import trained
from rollcall.train.main import on_all_ranks

if TYPE_CHECKING:
    import torch

    from rollcall.train.dist.signals import StopSignals
    from rollcall.train.dist.world import World
    from rollcall.train.inference.trained import Trained

USAGE = """\
rollcall generate RUN --prompt TEXT [options] [key=value ...]
       torchrun --nproc_per_node=2 -m rollcall.train generate RUN --prompt TEXT [key=value ...]

All ranks compute the same text, with any strategy. key=value overrides the run's configuration.
"""


def main(words: Sequence[str]) -> int:
    """Print the text token by token; return the exit code."""
    parser = argparse.ArgumentParser(prog="rollcall generate", usage=USAGE)
    add, text = parser.add_argument, parser.add_mutually_exclusive_group(required=True)
    add("run", metavar="RUN", help="name or directory of a run")
    text.add_argument("--prompt", help="text to continue, for data.name=text")
    text.add_argument("--tokens", help="comma-separated tokens to continue")
    add("--length", type=int, default=200, help="number of tokens to add (default: %(default)s)")
    heat = "divides the logits: below 1 favors likely tokens, 0 takes the likeliest (default: 1)"
    add("--temperature", type=float, default=1.0, help=heat)
    add("--top-k", type=int, default=0, help="take from the K likeliest tokens (default: all)")
    add("--seed", type=int, default=0, help="seed of the random choice (default: 0)")
    add("--best", action="store_true", help=trained.BEST)
    options, overrides = parser.parse_known_args(words)
    try:
        if not options.temperature >= 0 or options.length < 1 or options.top_k < 0:
            raise ConfigError("expected --length at least 1, --temperature and --top-k at least 0")
        run_dir, config = trained.find(options.run, overrides)
        prompt = _encode(options, config)
    except ConfigError as error:
        return refuse(error)
    return on_all_ranks(config.device, partial(_write, run_dir, config, options, prompt))


def _encode(options: argparse.Namespace, config: Config) -> list[int]:
    if options.prompt is None:
        try:
            return [int(number) for number in options.tokens.split(",")]
        except ValueError:
            text = f"--tokens: expected comma-separated numbers, got '{options.tokens}'"
            raise ConfigError(text) from None
    if config.data.name != "text":
        raise ConfigError(
            f"--prompt needs a run with data.name=text, but this run was trained on "
            f"{config.data.name}. If its samples are sequences of tokens, use --tokens with "
            "numbers, such as --tokens 5,17; `rollcall predict` works with every model"
        )
    if not options.prompt:
        raise ConfigError("--prompt: expected at least one character, got an empty text")
    return [*options.prompt.encode()]


def _write(
    run_dir: RunDir,
    config: Config,
    options: argparse.Namespace,
    prompt: list[int],
    world: "World",
    stop: "StopSignals",
) -> int:
    is_text = config.data.name == "text"
    with trained.load(run_dir, config, world, with_data=False, best=options.best) as model:
        _check(model, prompt)
        started = time.perf_counter()
        # A character may have several bytes, and a model may generate invalid ones.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def show(*new: int) -> None:
            if world.is_main:
                numbers = "".join(f"{token} " for token in new)
                print(decoder.decode(bytes(new)) if is_text else numbers, end="", flush=True)

        show(*prompt)
        chosen = tokens(model, world, prompt, options.temperature, options.top_k, options.seed)
        for count, token in enumerate(chosen, 1):
            show(token)
            if count == options.length or world.sum(stop.received is not None)[0]:
                break
    if world.is_main:
        rate = count / (time.perf_counter() - started)
        print(flush=True)
        print(f"rollcall: {count} tokens, {rate:.1f} tokens/s", file=sys.stderr)
    return 0 if count == options.length else os.EX_TEMPFAIL


def tokens(
    model: "Trained",
    world: "World",
    prompt: Sequence[int],
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[int]:
    """Yield the tokens that the model generates after `prompt`, endlessly, the same on every rank.

    The temperature divides the logits; 0 takes the likeliest token. `top_k=0` chooses from all.
    """
    import torch
    import torch.distributed as dist

    from rollcall.train.data.source import Batch
    from rollcall.train.numerics.randomness import derive

    generator = torch.Generator().manual_seed(derive(seed, "generate"))
    length = model.source.shape[0]
    text = list(prompt)
    while True:
        window = text[-length:]
        # Always the full length, which meshes can divide; causal attention ignores the padding.
        inputs = torch.tensor([window + [0] * (length - len(window))], device=world.device)
        batch = Batch(inputs, torch.zeros_like(inputs), torch.ones(1, device=world.device))
        outputs = model.outputs(batch)
        if outputs.ndim != 3:
            raise ConfigError(
                f"model.name={model.config.model.name} returns outputs of shape "
                f"{tuple(outputs.shape)}; to generate, expected logits (rows, length, tokens)"
            )
        logits = outputs[0, len(window) - 1].cpu()
        drawn = torch.tensor([_draw(logits, temperature, top_k, generator)])
        dist.broadcast(drawn, 0)  # one rank draws: logits of others may differ in the last bit
        text.append(int(drawn))
        yield text[-1]


def _draw(
    logits: "torch.Tensor", temperature: float, top_k: int, generator: "torch.Generator"
) -> int:
    import torch

    best = logits.topk(min(top_k or len(logits), len(logits)))
    if temperature == 0:
        return int(best.indices[0])
    probabilities = torch.softmax(best.values / temperature, 0)
    return int(best.indices[torch.multinomial(probabilities, 1, generator=generator)])


def _check(model: "Trained", prompt: Sequence[int]) -> None:
    if len(model.source.shape) != 1:
        raise ConfigError(
            f"model.name={model.config.model.name} was trained on samples of shape "
            f"{model.source.shape}, but only models of sequences can generate; use rollcall predict"
        )
    classes = model.source.classes
    if wrong := [token for token in prompt if not 0 <= token < classes]:
        raise ConfigError(f"--tokens: expected numbers below {classes}, got {wrong[0]}")
