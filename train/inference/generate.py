"""`python -m train generate RUN --prompt TEXT`: let a trained transformer write on."""

from __future__ import annotations

import argparse
import codecs
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from train.config import Config, ConfigError
from train.inference import trained
from train.run import RunDir

if TYPE_CHECKING:
    import torch

    from train.inference.trained import Trained
    from train.stop import StopSignals
    from train.world import World

USAGE = """\
python -m train generate RUN --prompt TEXT [options] [key=value ...]
       torchrun --nproc_per_node=2 -m train generate RUN --prompt TEXT parallel.strategy=zero3

All ranks compute the one text, with any strategy; key=value changes the run's configuration.
"""


def main(words: Sequence[str]) -> int:
    """Write the text to the standard output, token by token; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m train generate", usage=USAGE)
    parser.add_argument("run", metavar="RUN", help="name or directory of a run")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text to go on with, for data.name=text")
    prompt.add_argument("--tokens", help="the same as numbers with commas between them")
    parser.add_argument("--length", type=int, default=200, help="tokens to add (%(default)s)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="below 1 likely tokens get likelier; 0 takes the likeliest (%(default)s)",
    )
    parser.add_argument("--top-k", type=int, default=0, help="only of the K likeliest (all)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another text (0)")
    options, overrides = parser.parse_known_args(words)
    try:
        if options.temperature < 0 or options.length < 1 or options.top_k < 0:
            raise ConfigError("--length is at least 1, --temperature and --top-k at least 0")
        run_dir, config = trained.find(options.run, overrides)
        begin = _encode(options, config)
    except ConfigError as error:
        return trained.refuse(error)
    return trained.on_all_ranks(config, partial(_write, run_dir, config, options, begin))


def _encode(options: argparse.Namespace, config: Config) -> list[int]:
    if options.prompt is not None:
        if config.data.name != "text":
            raise ConfigError(
                f"this run learned from data.name={config.data.name}, whose tokens are not bytes: "
                "give them as numbers, --tokens 5,17"
            )
        found = [*options.prompt.encode()]
    else:
        try:
            found = [int(number) for number in options.tokens.split(",")]
        except ValueError:
            raise ConfigError(f"--tokens {options.tokens}: expected numbers with commas") from None
    if not found:
        raise ConfigError("--prompt is empty: give at least one character to go on with")
    return found


def _write(
    run_dir: RunDir,
    config: Config,
    options: argparse.Namespace,
    begin: list[int],
    world: World,
    stop: StopSignals,
) -> bool:
    is_text = config.data.name == "text"
    with trained.load(run_dir, config, world, with_data=False) as model:
        _check(model, begin)
        started = time.perf_counter()
        # A character may come in several bytes, and a model may write bytes that are none.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def show(*some: int) -> None:
            if world.is_main:
                numbers = "".join(f"{token} " for token in some)
                print(decoder.decode(bytes(some)) if is_text else numbers, end="", flush=True)

        show(*begin)
        count = 0
        for token in tokens(model, world, begin, options.temperature, options.top_k, options.seed):
            show(token)
            count += 1
            if count == options.length or trained.add(stop.received is not None)[0]:
                break
    if world.is_main:
        rate = count / (time.perf_counter() - started)
        print(flush=True)
        print(f"rollcall: {count} tokens, {rate:.1f} tokens/s", file=sys.stderr)
    is_done: bool = count == options.length
    return is_done


def tokens(
    model: Trained,
    world: World,
    begin: Sequence[int],
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[int]:
    """What the model writes after `begin`, without end, the same on every rank.

    Args:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: take only of that many likeliest; 0 for all.
    """
    import torch
    import torch.distributed as dist

    from train.data.source import Batch
    from train.randomness import derive

    generator = torch.Generator().manual_seed(derive(seed, "generate"))
    context = model.source.shape[0]
    text = list(begin)
    while True:
        window = text[-context:]
        # Always of full length, for meshes that cut it; a token does not see those after it.
        inputs = torch.tensor([window + [0] * (context - len(window))], device=world.device)
        batch = Batch(inputs, torch.zeros_like(inputs), torch.ones(1, device=world.device))
        logits = model.strategy.forward(batch)[0, len(window) - 1].cpu()
        drawn = torch.tensor([_draw(logits, temperature, top_k, generator)])
        dist.broadcast(drawn, 0)  # one rank draws: others may differ in the last bit
        text.append(int(drawn))
        yield text[-1]


def _draw(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    import torch

    best = logits.topk(min(top_k or len(logits), len(logits)))
    if temperature == 0:
        return int(best.indices[0])
    odds = torch.softmax(best.values / temperature, 0)
    return int(best.indices[torch.multinomial(odds, 1, generator=generator)])


def _check(model: Trained, begin: Sequence[int]) -> None:
    if len(model.source.shape) != 1:
        raise ConfigError(
            f"model.name={model.config.model.name} learned from samples of shape "
            f"{model.source.shape}; only models of sequences generate. For others: "
            "python -m train predict"
        )
    wrong = [token for token in begin if not 0 <= token < model.source.classes]
    if wrong:
        raise ConfigError(f"--tokens: {wrong[0]} is not below {model.source.classes}")
