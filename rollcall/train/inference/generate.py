"""`rollcall generate RUN --prompt TEXT [key=value …]`: continue a text with a trained transformer.

All ranks compute the same text, with any strategy: torchrun --nproc_per_node=2 -m rollcall.train
generate RUN … starts two. key=value overrides the run's configuration.
"""

import argparse
import importlib
import inspect
import math
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rollcall.cli.parser import parser as command_parser
from rollcall.config import Config, ConfigError
from rollcall.config.read import tokenizer_folder
from rollcall.messages.refusal import refuse
from rollcall.records.run_dir import RunDir
from rollcall.train.inference import trained
from rollcall.train.main import on_all_ranks

if TYPE_CHECKING:
    import torch

    from rollcall.train.inference.trained import Trained
    from rollcall.train.ranks.signals import StopSignals
    from rollcall.train.ranks.world import World

PART = "\ufffd"
"""The sign that a decoder writes while a character still lacks bytes."""


def main(words: Sequence[str]) -> int:
    """Print the text token by token; return the exit code."""
    parser = command_parser("generate", __doc__)
    add, prompt_group = parser.add_argument, parser.add_mutually_exclusive_group(required=True)
    add("run", metavar="RUN", help="name or directory of a run")
    prompt_group.add_argument("--prompt", help="text to continue")
    prompt_group.add_argument("--tokens", help="comma-separated tokens to continue")
    chat = "answer each line of the terminal, in the tokenizer's chat template; Ctrl-D ends"
    prompt_group.add_argument("--chat", action="store_true", help=chat)
    length = "number of tokens to add, if the model does not end the text (default: %(default)s)"
    add("--length", type=int, default=200, help=length)
    text = "divides the logits: below 1 favors likely tokens, 0 takes the likeliest (default: 1)"
    add("--temperature", type=float, default=1.0, help=text)
    add("--top-k", type=int, default=0, help="take from the K likeliest tokens (default: all)")
    add("--seed", type=int, default=0, help="seed of the random choice (default: 0)")
    add("--tokenizer", metavar="FOLDER", help="folder of the tokenizer (default: the run's)")
    add("--best", action="store_true", help=trained.BEST)
    options, overrides = parser.parse_with_keys(words)
    try:
        for name, least in (("length", 1), ("temperature", 0), ("top_k", 0)):
            if not (value := getattr(options, name)) >= least:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option}: expected at least {least}, got {value}")
        run_dir, config = trained.find(options.run, overrides)
        _check_options(options, config)
    except ConfigError as error:
        return refuse(error)
    return on_all_ranks(config.device, partial(_generate, run_dir, config, options))


def _check_options(options: argparse.Namespace, config: Config) -> None:
    """Read --tokens and find the tokenizer; raise ConfigError if the prompt cannot be read."""
    reads_bytes = config.data.name == "text"
    options.tokenizer = options.tokenizer or (None if reads_bytes else tokenizer_folder(config))
    if options.tokens is not None:
        try:
            options.tokens = [int(number) for number in options.tokens.split(",")]
        except ValueError:
            problem = f"--tokens: expected comma-separated numbers, got '{options.tokens}'"
            raise ConfigError(problem) from None
    elif options.tokenizer is None and (options.chat or not reads_bytes):
        raise ConfigError(
            f"{'--chat' if options.chat else '--prompt'} needs a tokenizer, but this run was "
            f"trained on {config.data.name}, and neither model.init nor model.args.base is a "
            "folder with one: add --tokenizer FOLDER. If its samples are sequences of tokens, "
            "--tokens takes numbers, such as --tokens 5,17; `rollcall predict` works with every "
            "model"
        )
    elif options.prompt == "":
        raise ConfigError("--prompt: expected at least one character, got an empty text")


def _generate(
    run_dir: RunDir,
    config: Config,
    options: argparse.Namespace,
    world: "World",
    stop: "StopSignals",
) -> int:
    with trained.load(run_dir, config, world, with_data=False, best=options.best) as model:
        writer = _Writer(model, world, stop, options)
        if options.chat:
            writer.chat()
        else:
            writer.write(options.tokens or writer.encode(options.prompt), shows_prompt=True)
    return os.EX_TEMPFAIL if writer.is_stopped else 0


class _Writer:
    def __init__(
        self, model: "Trained", world: "World", stop: "StopSignals", options: argparse.Namespace
    ) -> None:
        self._model, self._world, self._stop, self._options = model, world, stop, options
        self.is_stopped = False  # whether a signal has ended a text
        self._ends: set[int] = set()  # tokens that end a text
        self.encode: Callable[[str], list[int]] = lambda text: [*text.encode()]
        self._decode: Callable[[list[int]], str] = lambda ids: bytes(ids).decode(errors="replace")
        if options.tokens is not None:
            self._decode = lambda ids: "".join(f"{token} " for token in ids)
        elif options.tokenizer is not None:
            from rollcall.train.data.tokenizer import load

            self._tokenizer = load(options.tokenizer, "the tokenizer of this run")
            self.encode = lambda text: self._tokenizer(text)["input_ids"]
            self._decode = partial(self._tokenizer.decode, skip_special_tokens=True)
            ends = getattr(_network(model), "eos_token_id", None)
            self._ends = {*(ends if isinstance(ends, list) else [ends])}
            self._ends.add(self._tokenizer.eos_token_id)

    def chat(self) -> None:
        """Answer one line of the terminal after another, until they end."""
        messages: list[dict[str, str]] = []
        tokenizer = self._tokenizer
        if not tokenizer.chat_template:
            raise ConfigError(f"--chat: the tokenizer in {tokenizer.name_or_path} has no template")
        for line in self._lines():
            messages.append({"role": "user", "content": line.strip()})
            options: Any = {"tokenize": False, "add_generation_prompt": True}
            text = tokenizer.apply_chat_template(messages, **options)
            answer = self.write(tokenizer(text, add_special_tokens=False)["input_ids"])
            messages.append({"role": "assistant", "content": answer})

    def _lines(self) -> Iterator[str]:
        """Yield the lines of the terminal on all ranks, until they end or a signal comes."""
        text, goes_on = b"", True
        while goes_on and not self.is_stopped:
            line = None
            if self._world.is_main:
                # For a second: the other ranks wait in a collective, which has a time limit.
                if b"\n" not in text and select.select([sys.stdin], [], [], 1.0)[0]:
                    new = os.read(sys.stdin.fileno(), 65536)
                    text, goes_on = text + new, bool(new)
                if b"\n" in text or (text and not goes_on):
                    head, _, text = text.partition(b"\n")
                    line = head.decode(errors="replace")
            self.is_stopped = bool(self._world.sum(self._stop.received is not None)[0])
            line, goes_on = self._world.broadcast((line, goes_on))
            if line is not None and not self.is_stopped:
                yield line

    def write(self, prompt: list[int], shows_prompt: bool = False) -> str:
        """Print what the model adds to a prompt, and return it."""
        _check(self._model, prompt)
        options, world, started = self._options, self._world, time.perf_counter()
        choose = options.temperature, options.top_k, options.seed
        chosen = tokens(self._model, world, prompt, *choose)
        ids, shown, count, is_over = [*prompt] if shows_prompt else [], "", 0, False
        while True:
            text = self._decode(ids)
            if is_over or not text.endswith(PART):
                print(text[len(shown) :] if world.is_main else "", end="", flush=True)
                shown = text
            if is_over:
                break
            token = next(chosen, None)
            is_over = token is None or token in self._ends
            count += token is not None
            ids += [] if token is None or is_over else [token]
            self.is_stopped = bool(world.sum(self._stop.received is not None)[0])
            is_over = is_over or self.is_stopped or count == options.length
        if world.is_main:
            rate = count / (time.perf_counter() - started)
            print(flush=True)
            print(f"rollcall: {count} tokens, {rate:.1f} tokens/s", file=sys.stderr)
        return shown


def tokens(
    model: "Trained",
    world: "World",
    prompt: Sequence[int],
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    caches: bool = True,
) -> Iterator[int]:
    """Yield the tokens that the model generates after `prompt`, the same on every rank.

    They end only where a model of transformers has no more positions. `caches` keeps keys and
    values, in causal models of transformers and those with a method new_cache(); otherwise the last
    `model.source.shape[0]` tokens are computed again. Raise ConfigError for other than logits.
    """
    import torch
    import torch.distributed as dist

    from rollcall.train.data.source import Batch
    from rollcall.train.numerics.randomness import derive

    generator = torch.Generator().manual_seed(derive(seed, "generate"))
    cache = _own_cache(model) if caches else {}
    window = model.source.shape[0] if cache else math.inf
    if caches and (name := _cache_argument(model)):
        network: Any = _network(model)
        library: Any = importlib.import_module("transformers")
        cache = {name: library.DynamicCache(config=network), "use_cache": True}
    text, new = list(prompt), list(prompt)
    most = _most(model)
    while len(text) < most:
        if not cache or len(text) > window:
            cache, length = {}, model.source.shape[0]
            new = text[-length:]
            # Always the full length, which meshes can divide; causal attention ignores the padding.
            rows = torch.tensor([new + [0] * (length - len(new))], device=world.device)
            inputs: Any = rows
        else:
            rows = torch.tensor([new], device=world.device)
            inputs = {"input_ids": rows, **cache}
        batch = Batch(inputs, torch.zeros_like(rows), torch.ones(1, device=world.device))
        outputs = model.outputs(batch)  # which fills the cache in place
        if outputs.ndim != 3:
            raise ConfigError(
                f"model.name={model.config.model.name} returns outputs of shape "
                f"{tuple(outputs.shape)}; to generate, expected logits (rows, length, tokens)"
            )
        logits = outputs[0, len(new) - 1].cpu()
        drawn = torch.tensor([_draw(logits, temperature, top_k, generator)])
        dist.broadcast(drawn, 0)  # rank 0 draws: the ranks' logits may differ in the last bit
        new = [int(drawn)]
        text += new
        yield text[-1]


def _network(model: "Trained") -> Any:
    """Return the configuration of a model of transformers; None for other models."""
    return getattr(model.strategy.model, "config", None)


def _own_cache(model: "Trained") -> dict[str, Any]:
    """Return a new cache of a model that has one, unless sequences or layers are spread."""
    degrees, parallel = model.strategy.degrees, model.config.parallel
    spread = degrees.get("context", 1) * degrees.get("pipeline", 1) > 1
    network: Any = model.strategy.model
    takes_one = "cache" in inspect.signature(network.forward).parameters
    if not (hasattr(network, "new_cache") and takes_one) or spread or parallel.sequence_parallel:
        return {}
    return {"cache": network.new_cache()}


def _cache_argument(model: "Trained") -> str:
    """Return which argument of a causal model of transformers is its cache; empty for others."""
    network: Any = model.strategy.model
    if not getattr(network, "can_generate", bool)() or network.config.is_encoder_decoder:
        return ""
    known = inspect.signature(network.forward).parameters  # models with another state have neither
    return next((name for name in ("cache", "past_key_values") if name in known), "")


def _most(model: "Trained") -> float:
    positions = getattr(_network(model), "max_position_embeddings", math.inf)
    return positions if _cache_argument(model) else math.inf


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
    """Raise ConfigError if the model does not generate, or does not know a token of the prompt."""
    if len(model.source.shape) != 1 and not _cache_argument(model):
        raise ConfigError(
            f"model.name={model.config.model.name} was trained on samples of shape "
            f"{model.source.shape}, but only models of sequences can generate; use rollcall predict"
        )
    classes = getattr(_network(model), "vocab_size", None) or model.source.classes or math.inf
    if wrong := [token for token in prompt if not 0 <= token < classes]:
        raise ConfigError(f"the prompt: expected numbers below {classes}, got {wrong[0]}")
    if not prompt:
        raise ConfigError("the prompt: expected at least one token, got none")
    if (length := len(prompt)) >= (most := _most(model)):
        raise ConfigError(f"the prompt has {length} tokens, but the model has {most} positions")
