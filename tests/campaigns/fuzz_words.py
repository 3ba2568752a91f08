"""Random command lines with configurations, and mutated sbatch scripts; see fuzz.py."""

from __future__ import annotations

import random
import shlex
from pathlib import Path

from checkout import ROOT

from rollcall.cli.commands import COMMANDS
from rollcall.config import describe, recipes
from rollcall.config.read import RECIPES
from rollcall.launch.scheduler.sbatch_options import FLAGS, WITH_VALUE
from rollcall.launch.submission.options import _parser

NASTY = [
    *("", " ", "-", "--", "=", ":", ".", "..", "/", "~", "%", "%j", "*", "&", "!", "#", "\t", "\n"),
    *("0", "-1", "1e400", "-1e400", "nan", ".inf", "-.inf", "1_000", "0x10", "017", "9" * 5000),
    *("1e3", "3", "0.5", "1.5e", "²", "٣", "2:00:00", "1-1:1", "1-", "-1", "2-1", "2-8", "1-1000"),
    *("2026-02-30", "2026-11-22", "2001-12-14t21:59:43.10-05:00", "2001-12-14t99:99:99"),
    *("on", "off", "no", "yes", "true", "null", "None", "[]", "{}", "[1, 2]", "{a: 1}", "auto"),
    *("!!int x", "!!float x", "!!bool x", "!!timestamp x", "!!binary x", "!!null x", "!!set {a}"),
    *("!!python/object/apply:os.getpid []", "!x y", "!<tag:y,2002:int> 3", "!!omap [a]", "!!pairs"),
    *("&a [*a]", "*a", "{a: &b [*b]}", "{<<: 1}", "{<<: {a: 1}}", "{[1]: 2}", "{{}: 1}", "? [a]"),
    *("[1,2", "{", "}", "a: b: c", "'", '"', "'''", "|", ">", "@a", "`a`", "--- a", "..."),
    *("%YAML 9.9",),
    *("é", "\udce9", "\u202e", "\ufeff", "\u2028", "\x7f", "\x1b[31m", "日本", "a b", "$(x)"),
    *("a\nb",),
    *("a:b", "a.b:c", "os:getcwd", "sys:exit", "math:pi", "__main__:x", "no_module:Net", "a:"),
    *("[" * 200, "[" * 60_000, "{a: " * 60_000, "- " * 20_000, "(" * 3000, "a" * 300, "a" * 5000),
    *("/dev/null",),
    *("/nowhere/at/all", "/proc/self/mem", "../..", "a/b", "it.yaml", "x" * 300 + "/y"),
    *("shard=rest", "tensor=0", "shard=rest,shard=rest", "data=2,tensor=999", "64G", "1X", "gpu:4"),
]  # fmt: skip
LINES = """\
train --print-config digits train.steps=3 optim.lr=1e-3 run.name=it
train --print-config mine.yaml data.global_batch=32 parallel.strategy=zero3
train --print-config gpt model.num_layers=2 parallel.mesh=shard=rest,tensor=2
train --help optim
train --help optim.lr
train --print-schema
explain mine.yaml faults.divergence=warn checkpoint.every=null
explain gpt model.dropout=0.1 faults.hang_seconds=auto exact_shards=8
plan mine.yaml parallel.strategy=tensor
submit --dry-run --nodes 2 --gpus-per-node 4 --time 2:00:00 mnist optim.lr=3e-4
submit --dry-run --nodes 2-8 --nproc-per-node 2 mnist
submit --dry-run --nodes 2 --spares 1 --mem 64G --cpus-per-task 8 mine.yaml
submit --dry-run --local --nodes 2 -- script.py --flag
submit --dry-run --nodes 2 -- -m module --flag
submit --dry-run -N 2 -c 8 -p gpu -A account -J name -t 10
submit --dry-run --cluster site --array 0-3%1 --name it --root runs
submit --dry-run --srun-arg=--cpu-bind=none --chain 3 --max-restarts 2 --qos=high
submit --dry-run --resume --new-code --start-method torchrun --name it
sweep submit --dry-run sweep.yaml
sweep status --sort loss --csv table.csv sweep.yaml
status
status --root runs it
why it
logs it --rank 1 --merge --node 0
stacks it
attach it --node 1 true
cancel it
requeue it
drill it kill-rank
lint script.sbatch
predict it --split validation
generate it --help
checkpoint list runs/it
checkpoint verify runs/it""".splitlines()
HARMLESS = {"train": "--print-config", "submit": "--dry-run"}
"""Options that keep a command from starting anything."""
FILES = {
    "mine.yaml": (RECIPES / "gpt.yaml").read_text(),
    "sweep.yaml": "program: [digits, train.steps=100]\ngrid: {optim.lr: [1e-3, 3e-4], seed: [0]}\n"
    "list: [{optim.lr: 1e-2}]\noptions: {nodes: 1, time: 10}\nthrottle: 2\nsort: accuracy\n",
    "clusters/site.yaml": "options: {partition: gpu, nodes: 2}\nmodules: [cuda]\n"
    "environment: {NAME: value}\nsetup: [true]\n",
    "script.py": "print(1)\n",
    "module.py": "print(1)\n",
    "script.sbatch": "#!/bin/bash\n#SBATCH --nodes=2\nsrun true\n",
}


class Words:
    """Command lines and configurations: valid ones with some changes."""

    def __init__(self, template: Path) -> None:
        del template
        keys = list(describe())
        self._keys = [key.name for key in keys]
        choices = [choice for key in keys for choice in key.type.split(" | ")]
        self._values = [*NASTY, *choices, *recipes()]
        own = _parser()._option_string_actions
        sbatch = [f"--{name}" for name in sorted(FLAGS | WITH_VALUE)]
        self._options = [*own, *sbatch, "--print-config", "--print-schema", "--help", "--root"]

    def commands(self, chance: random.Random, place: Path) -> list[list[str]]:
        """Write recipes, a sweep and a profile, one of them changed; return one command."""
        changed = chance.choice([*FILES, None])
        for name, text in FILES.items():
            path = place / name
            path.parent.mkdir(exist_ok=True)
            data = text.encode()
            for _ in range(chance.randint(1, 3) if name == changed else 0):
                data = self._change_file(chance, data)
            path.write_bytes(data)
        words = shlex.split(chance.choice(LINES))
        for _ in range(chance.randint(0, 3)):
            words = self._change(chance, words)
        words = [word.replace("\0", "") for word in words]
        command = words[0] if words else ""
        if command == "sweep" and "submit" in words:
            words.insert(words.index("submit") + 1, "--dry-run")
        elif command in HARMLESS:
            words.insert(1, HARMLESS[command])
        elif command in ("batch", "supervise", "verify"):
            words = [command, "--help"]
        return [words]

    def _change(self, chance: random.Random, words: list[str]) -> list[str]:
        place = chance.randint(1, len(words)) if words else 0
        key, value = chance.choice(self._keys), chance.choice(self._values)
        option = chance.choice(self._options)
        kind = chance.randrange(10)
        if kind <= 2:
            return [*words[:place], f"{key}={value}", *words[place:]]
        if kind == 3:
            return [*words[:place], value, *words[place + 1 :]]
        if kind == 4:
            return [
                *words[:place],
                *chance.choice(([option, value], [f"{option}={value}"], [option])),
                *words[place:],
            ]
        if kind == 5:
            return [*words[:place], *words[place + 1 :]]
        if kind == 6:
            return [*words, *shlex.split(chance.choice(LINES))[1:]]
        if kind == 7 and place < len(words):
            return [*words[:place], _spoilt(chance, words[place], value), *words[place + 1 :]]
        if kind == 8 and place < len(words):
            head, equals, _ = words[place].partition("=")
            return [*words[:place], f"{head}{equals or '='}{value}", *words[place + 1 :]]
        if kind == 9 and chance.random() < 0.1:
            return [chance.choice([*COMMANDS, *NASTY]), *words[1:]]
        return words

    def _change_file(self, chance: random.Random, data: bytes) -> bytes:
        value = chance.choice(self._values).encode(errors="surrogateescape")
        lines = data.split(b"\n")
        place = chance.randrange(len(lines))
        kind = chance.randrange(6)
        if kind == 0:
            return value
        if kind == 1:
            return b"\n".join([*lines[:place], value, *lines[place:]])
        if kind == 2:
            head, colon, _ = lines[place].partition(b":")
            return b"\n".join([*lines[:place], head + colon + b" " + value, *lines[place + 1 :]])
        if kind == 3:
            return flipped(chance, data)
        if kind == 4:
            section, _, name = chance.choice(self._keys).rpartition(".")
            added = (
                f"{section}: {{{name}: ".encode() + value + b"}"
                if section
                else name.encode() + b": " + value
            )
            return b"\n".join([*lines, added])
        return data[: chance.randrange(len(data) + 1)]


class Scripts:
    """The scripts of lint's tests and the templates, changed."""

    PIECES = (
        *"`$(){}[]#'\"\\;&|<>!*?=~%\n\t \r\0",
        *("$((", "))", "$( ", "${", "<<EOF\n", "<<'E'\n", "<<-E\n", "EOF\n", "E\n", "((1 # 2))"),
        *("$((a # b))", "$'", "<(", ">(", "#SBATCH ", "#SBATCH --", "#SBATCH -t", "srun "),
        *("torchrun ", "case x in x) ", "esac", "\\\n", "&&", "||", ";;", "a+=(1", "x=", "$x"),
        *("${x[@]}", "\udcff", "é", "²:00", "9" * 400, "[" * 400),
        *("$(" * 3000, "${" * 3000, "{" * 3000, "`" * 301, '"' * 301, "(" * 3000),
    )  # fmt: skip

    def __init__(self, template: Path) -> None:
        del template
        scripts = ROOT / "tests" / "unit" / "tools" / "lint" / "scripts"
        paths = sorted([*scripts.glob("*.sbatch"), *ROOT.glob("slurm/*.sbatch")])
        self._texts = [path.read_text() for path in paths]

    def commands(self, chance: random.Random, place: Path) -> list[list[str]]:
        """Write one script; return the command that checks it."""
        text = chance.choice(self._texts)
        for _ in range(chance.randint(1, 8)):
            text = self._change(chance, text)
        (place / "script.sbatch").write_bytes(text.encode(errors="surrogateescape"))
        return [["lint", "script.sbatch"]]

    def _change(self, chance: random.Random, text: str) -> str:
        kind = chance.randrange(6)
        lines = text.split("\n")
        one, other = chance.randrange(len(lines)), chance.randrange(len(lines))
        if kind == 0:
            other_text = chance.choice(self._texts)
            return (
                text[: chance.randrange(len(text) + 1)]
                + other_text[chance.randrange(len(other_text)) :]
            )
        if kind == 1:
            lines[one], lines[other] = lines[other], lines[one]
            return "\n".join(lines)
        if kind == 2:
            return "\n".join([*lines[:one], *lines[one + 1 :]])
        return _spoilt(chance, text, chance.choice(self.PIECES))


def flipped(chance: random.Random, data: bytes) -> bytes:
    """Return the data with up to eight flipped bits."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 8) if changed else 0):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _spoilt(chance: random.Random, text: str, piece: str) -> str:
    """Return the text without some characters, or with others in between."""
    start = chance.randint(0, len(text))
    end = min(len(text), start + chance.choice((0, 0, 1, 5)))
    return text[:start] + (piece if chance.random() < 0.8 else "") + text[end:]
