"""Run public scripts unmodified under torchrun and under `rollcall submit`; compare their numbers.

`PYTHONPATH=. python tests/campaigns/public_scripts.py FOLDER [PART OF A NAME …]`, where FOLDER has
clones of the repositories in public_scripts.yaml, each under its own name; a row whose script is
not there is skipped. The packages that the scripts import must be installed, or lie in PYTHONPATH.
Data sets that the scripts would download are replaced by small random ones of the same form.

Each side runs in its own copy of the repository. The matches of a row's pattern in the output of
every rank must be equal to the last digit. JAX, TensorFlow and Ray know no torchrun: the other side
is then one process per rank with variables written by hand. Exit code: 1 if a row differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 600
"""Seconds for one side of a row."""
TABLE = Path(__file__).with_suffix(".yaml")
NUMBER = r"[-+]?\d+\.\d+(?:e[-+]\d+)?"


def mnist(folder: Path) -> None:
    """Write random digits in MNIST's files, which torchvision reads without a download."""
    raw, source = folder / "MNIST" / "raw", random.Random(0)
    raw.mkdir(parents=True)
    for name, count in (("train", 640), ("t10k", 256)):
        images, labels = source.randbytes(count * 784), bytes(source.choices(range(10), k=count))
        head = struct.pack(">iiii", 2051, count, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(head + images)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 2049, count) + labels)


def images(folder: Path, classes: int = 2) -> None:
    """Write random images of a few classes for torchvision's ImageFolder."""
    from PIL import Image

    source = random.Random(0)
    for part, count in (("train", 16), ("val", 8)):
        for number in range(count):
            path = folder / part / f"class{number % classes}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.frombytes("RGB", (64, 64), source.randbytes(64 * 64 * 3)).save(path)


def text(folder: Path) -> None:
    """Write random words in the three files of a language model's data."""
    source = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("train", 200), ("valid", 40), ("test", 40), ("input", 200)):
        words = (
            " ".join(source.choices(["a", "cat", "sat", "on", "it"], k=12)) for _ in range(lines)
        )
        # The last line is what minGPT continues.
        (folder / f"{name}.txt").write_text("\n".join([*words, "O God, O God!"]) + "\n")


def wikitext(folder: Path) -> None:
    """Write random words in the file that Lightning's demo would download: 4,200 rows of 35."""
    source = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    lines = (" ".join(source.choices("abcdefgh", k=34)) for _ in range(4200))
    (folder / "wikitext-2.txt").write_text("\n".join(lines) + "\n")


def chats(folder: Path) -> None:
    """Write a tiny causal model, its tokenizer, texts, pairs of answers, and a configuration."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    source, words = random.Random(0), [*"abcdefgh"]
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<pad>", "<end>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<end>"
    ).save_pretrained(folder / "tiny")
    torch.manual_seed(0)
    shape = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(vocab_size=len(vocabulary), pad_token_id=1, eos_token_id=2, **shape)
    GPT2LMHeadModel(config).save_pretrained(folder / "tiny")
    adam = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
    zero = {"zero_optimization": {"stage": 2}, "optimizer": adam}
    zero["train_micro_batch_size_per_gpu"] = "auto"
    (folder / "zero.json").write_text(json.dumps(zero))
    for kind, columns in (("texts", ["text"]), ("pairs", ["prompt", "chosen", "rejected"])):
        (folder / kind).mkdir()
        rows = [{it: " ".join(source.choices(words, k=8)) for it in columns} for _ in range(64)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / kind / "train.jsonl").write_text(lines)


DATA: dict[str, Callable[[Path], None]] = {
    "mnist": mnist,
    "images": images,
    "8-classes": partial(images, classes=8),
    "text": text,
    "wikitext": wikitext,
    "chats": chats,
}


@dataclass(frozen=True)
class Row:
    """A row of public_scripts.yaml."""

    name: str  # repository and script, and a remark
    words: str = ""
    ranks: int = 1
    pattern: str = r"(?:[Ll]oss|LOSS)\S*[:=]?\s*(NUMBER)"
    data: str = ""  # a function of DATA, and where it writes, from the script's directory
    env: str = ""  # a variable; PYTHONPATH is relative to the script's directory
    before: str = ""  # a script beside it that prepares data
    code: int = 0  # 1 if the script fails by itself
    framework: str = "torch"
    module: str = ""  # an installed module instead of a file
    roles: str = ""  # of TensorFlow's ranks: a chief first, and only it is compared
    on_cpu: bool = False  # the script names CUDA; see cuda_on_cpu/


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="PART OF A NAME")
    options = parser.parse_args()
    worst = 0
    for row in (Row(**values) for values in yaml.safe_load(TABLE.read_text())):
        if not options.names or any(part in row.name for part in options.names):
            began = time.monotonic()
            result = compare(row, options.folder.absolute())
            worst = max(worst, result.startswith("DIFFERS"))
            print(
                f"| {row.name} | {row.ranks} | {result} | {time.monotonic() - began:.0f} s |",
                flush=True,
            )
    return worst


def compare(row: Row, folder: Path) -> str:
    """Run both sides; return what was compared, or how they differ."""
    repository, _, script = row.name.split()[0].partition("/")
    if not row.module and not (folder / repository / script).exists():
        return "skipped: not in the folder"
    sides = []
    for side in (other_launcher, rollcall):
        with tempfile.TemporaryDirectory() as temporary:
            top = Path(temporary) / (repository if script else "empty")
            if script:
                shutil.copytree(
                    folder / repository, top, symlinks=True, ignore=shutil.ignore_patterns(".git")
                )
            place = (top / script).parent if script else top
            place.mkdir(parents=True, exist_ok=True)
            if row.data:
                kind, where = row.data.split()
                DATA[kind](place / where)
            subprocess.run(["git", "init", "-q", str(top)], check=True)
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            if row.on_cpu:
                stand_in = str(TABLE.with_name("cuda_on_cpu"))
                env["PYTHONPATH"] = os.pathsep.join([stand_in, env.get("PYTHONPATH", "")])
            for word in shlex.split(row.env):
                name, _, value = word.partition("=")
                paths = [str((place / value).resolve()), env.get(name, "")]
                env[name] = os.pathsep.join(filter(None, paths)) if name == "PYTHONPATH" else value
            if row.before:
                subprocess.run([sys.executable, row.before], cwd=place, env=env, check=True)
            program = ["-m", row.module] if row.module else [Path(script).name]
            sides.append(side(row, [*program, *shlex.split(row.words)], place, env))
    (code, logs), (code_here, logs_here) = sides
    pattern = row.pattern.replace("NUMBER", NUMBER)
    numbers, numbers_here = ([re.findall(pattern, log) for log in of] for of in (logs, logs_here))
    count = sum(map(len, numbers))
    if code_here != code and 0 in (code, code_here):
        return f"DIFFERS: exit codes {code} and {code_here}\n" + "\n".join(logs + logs_here)[-3000:]
    if not count or (code != 0) != (row.code != 0):
        errors = re.findall(r"(?m)^.*Error: .*$", "\n".join(logs)) or [logs[0][-300:]]
        return f"not comparable: exit code {code}, {count} values: {errors[-1]!r}"
    if numbers != numbers_here:
        return f"DIFFERS: {numbers} and {numbers_here}"[:1500]
    last = next(of[-1] for of in numbers if of)
    return f"{count} values equal, the last {last.strip().splitlines()[-1][:60]}"


def other_launcher(
    row: Row, words: list[str], place: Path, env: dict[str, str]
) -> tuple[int, list[str]]:
    """Run with torchrun, mpiexec or by hand; return the exit code and the output of each rank."""
    if row.framework in ("jax", "tensorflow", "ray"):
        return by_hand(row, words, place, env)
    logs = place / "logs-of-torchrun"
    if row.framework == "mpi":
        command = [
            "mpiexec",
            "-n",
            str(row.ranks),
            "-outfile-pattern",
            str(logs / "%r"),
            sys.executable,
        ]
        logs.mkdir()
    else:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={row.ranks}",
        ]
        command += ["--redirects=3", f"--log-dir={logs}"]
    done = subprocess.run(
        [*command, *words], cwd=place, env=env, capture_output=True, text=True, timeout=LIMIT
    )
    if row.framework == "mpi":
        return done.returncode, [(logs / str(rank)).read_text() for rank in range(row.ranks)]
    ranks = [[*logs.glob(f"*/*/{rank}/std*.log")] for rank in range(row.ranks)]
    return done.returncode, ["".join(path.read_text() for path in sorted(of)) for of in ranks]


def by_hand(row: Row, words: list[str], place: Path, env: dict[str, str]) -> tuple[int, list[str]]:
    """Start one process per rank, with the variables that its framework's documentation names."""
    ports = []
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(row.ranks)]
    for one in sockets:
        ports.append(one.getsockname()[1])
        one.close()
    roles = row.roles.split(",") if row.roles else ["worker"] * row.ranks
    cluster: dict[str, list[str]] = {}
    for role, port in zip(roles, ports, strict=True):
        cluster.setdefault(role, []).append(f"127.0.0.1:{port}")
    ranks = []
    for rank, role in enumerate(roles):
        if row.framework == "tensorflow":
            task = {"type": role, "index": roles[:rank].count(role)}
            given = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}
        elif row.framework == "ray":  # starts its ranks itself
            given = {}
        else:  # as mpirun of Open MPI would; JAX asks for the coordinator alone in its own name
            given = {"OMPI_MCA_orte_hnp_uri": f"0.0;tcp://127.0.0.1:{ports[0]}"}
            given |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{ports[0]}"}
            given |= {"OMPI_COMM_WORLD_SIZE": str(row.ranks), "OMPI_COMM_WORLD_RANK": str(rank)}
            given |= {"OMPI_COMM_WORLD_LOCAL_RANK": str(rank)}
        log = (place / f"by-hand-{rank}").open("w+")
        command = [sys.executable, *words]
        process = subprocess.Popen(
            command, cwd=place, env=env | given, stdout=log, stderr=subprocess.STDOUT
        )
        ranks.append((process, log))
    try:
        awaited = ranks[:1] if row.roles else ranks
        code = max(process.wait(timeout=LIMIT) for process, _ in awaited)
    finally:
        for process, _ in ranks:
            process.kill()
            process.wait()
    outputs = []
    for _, log in awaited:
        with log:
            log.seek(0)
            outputs.append(log.read())
    return code, outputs


def rollcall(row: Row, words: list[str], place: Path, env: dict[str, str]) -> tuple[int, list[str]]:
    """Run with rollcall on this machine; return the exit code and the output of each rank."""
    command = [
        sys.executable,
        str(ROOT / "launch" / "submit.py"),
        "--local",
        "--wait",
        "--name=run",
    ]
    if row.data and not row.data.endswith(" ."):  # git may ignore it; then submit says so
        command.append(f"--link={row.data.split()[1]}")
    if row.roles:
        command.append(f"--roles={row.roles}")
    command += [f"--nproc-per-node={row.ranks}", f"--framework={row.framework}", "--", *words]
    done = subprocess.run(
        command, cwd=place, env=env, capture_output=True, text=True, timeout=LIMIT
    )
    ranks = 1 if row.roles else row.ranks
    logs = [place / f"runs/run/logs/attempt-0/node-0/rank-{rank}.log" for rank in range(ranks)]
    return done.returncode, [path.read_text() if path.exists() else done.stderr for path in logs]


if __name__ == "__main__":
    sys.exit(main())
