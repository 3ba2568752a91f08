"""Users of torchrun, Slurm, hydra and mpiexec type what they know; one line answers them."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

from rollcall.cli import program as cli
from rollcall.records.job import JobRecord

FILES = {
    "ok.py": "print(1)\n",
    "net.py": "class Net:\n    def forward(self, x):\n        return x\n\n\nnet = Net()\n",
    "job.sbatch": "#!/bin/bash\nsrun python ok.py\n",
    "dotted.yaml": "train.steps: 2\n",
    "momentum.yaml": "optim: {name: adamw, momentum: 0.5}\n",
    "python.sbatch": "#!/usr/bin/env python\nprint(1)\n",
    "indent.yaml": "train:\n  steps: 2\n   epochs: 1\n",
    "includes.yaml": "defaults: [digits]\n",
    "latin.yaml": "model: \udce9\n",
    "notes.txt": "see you\n",
    "broken.py": "class Net(:\n",
}
ANSWERS = {
    "train -n 0": "-n: expected a number of ranks such as 4, got '0'",
    "train -np two digits": "-np: expected a number of ranks such as 4, got 'two'",
    "train net.py": "net.py is code, not a recipe: `rollcall submit -- net.py` runs a script, and "
    "model.name=net:NAME",
    "train digits model.name=./net.py": "model.name: unknown './net.py'; write "
    "package.module:attribute, here net:NAME",
    "train digits model.name=src/net.py": "here src.net:NAME",
    "train digits model.name=net:net": "model.name=net:net: expected a class or a function, got an "
    "object",
    "train digits parallel.strategy=DDP": "got 'DDP', did you mean 'ddp'?",
    "train digits parallel.strategy=fsdp3": "PyTorch's FSDP is zero3",
    "train digits optim.lr= 0.1": "'optim.lr=': expected key=value without spaces around '='",
    "train digits 'optim.lr = 0.1'": "write optim.lr=0.1, without spaces",
    "train digits data.name=text 'data.path=*.jpg'": "/*.jpg does not exist; expected the path",
    "train digits optim.args.betas=0.9": "expected a list such as [0.9, 0.95], got 0.9",
    "train digits optim.args.betas=[0.9]": "optim.args.betas: expected a further item, got [0.9]",
    "train digits train.callbacks.X.args.a=1 train.callbacks=net:Net": "train.callbacks=net:Net "
    "replaces train.callbacks.X.args.a=1, which stands before it; write it first",
    "train digits optim.lr=1 optim=adam": "did you mean optim.name=adam?",
    "train digits train.metrics=accuracy": "train.metrics: unknown 'accuracy'; leave it out; an "
    "evaluation reports the loss, and accuracy, top5",
    "train digits train.loss=nn.CrossEntropyLoss": "unknown 'nn.CrossEntropyLoss', did you mean "
    "'cross_entropy'?",
    "train --ranks=4 --nproc_per_node=2 digits": "--ranks: the number of ranks is given twice",
    "train digits print-config": "did you mean --print-config?",
    "train digits --checkpoint fine": "a run resumes if you start it again under its name",
    "train digits checkpoint=fine": "checkpoint.every, got 'fine'; a run resumes if you start it",
    "train digits --amp": "write precision=bf16 (",
    "train optim.lr": "'optim.lr' is a key; write optim.lr=..., or --help optim.lr to read about",
    "explain optim.lr": "--help optim.lr to read about it",
    "train digits optim.lr=1e-3,1e-4": "`rollcall sweep submit FILE` starts a run for each value",
    "train digits device=0": "device: expected auto, cpu or cuda, got 0",
    "train digits model.args=width:3": "expected a mapping such as {width: 64}, got 'width:3'",
    "train digits data.name=imagefolder": "did you mean 'folder'?",
    "train digits checkpoint.keep_best=acc": "choose loss, accuracy, top5, perplexity or add it to",
    "train digits profile.steps=10": "such as 10:13 for the steps 10 to 12",
    "train digits faults.hang_seconds=5m": "faults.hang_seconds: expected auto or a number, got",
    "train digits parallel.mesh=replicate=rest,shard=rest": "only one dimension can have",
    "train --nnodes 2 digits": "`rollcall submit --nodes N` or `torchrun --nnodes N`",
    "submit --local --": "expected a script or -m module after `--`",
    "submit --local --python ok.py -- ok.py": "expected a program such as venv/bin/python, or the",
    "submit --local --roles boss:1 -- ok.py": "expected chief, ps, worker or evaluator, each once",
    "submit --local --gpus-per-node a100:2x -- ok.py": "or a type and a number such as a100:4",
    "submit --local --array 1-x -- ok.py": "expected indices such as 0-7, 1,3,5 or 0-99:10%4",
    "submit --local ok.py --lr 0.1": "rollcall submit --local -- ok.py --lr 0.1",
    "submit --local --start-method spawn -- ok.py": "expected one of fork, torchrun; got 'spawn'",
    "submit --cluster nosuch digits": "--cluster nosuch: no such profile; ",
    "doctor --quik": "unrecognized arguments: --quik, did you mean '--quick'?",
    "plan gpt --gpu a1000": "unknown chip 'a1000', did you mean 'A100'?",
    "plan gpt --gpu h100 --nodes many": "--nodes many: expected a whole number from 1 to",
    "bench speed": "unknown benchmark 'speed', did you mean 'speedup'?",
    "sweep submit dotted.yaml": "the keys are program, grid, list, options, throttle, sort",
    "tokenize nosuch.txt --tokenizer x --output y": "no file matches 'nosuch.txt'; name a file or",
    "dashboard --port abc": "--port: expected a whole number, got 'abc'",
    "train digits optim.args.momentum=0.9": "adamw has no argument 'momentum'; it takes ",
    "train digits 'optim={lr: 0.1'": "the value is not valid YAML",
    "train digits log.to=csv": "choose tensorboard, wandb, mlflow, or your own as package.module",
    "train digits data.seq_len=5": "data.seq_len is an option of text, tokens,",
    "submit --local --wrap 'python ok.py'": "before it: rollcall submit --local -- ok.py",
    "doctor --nodes 2": "write rollcall submit --doctor --nodes 2, which checks the nodes of a job",
    "train digits mnist": "got 'digits' and 'mnist'; leave one of them out",
    "train digits faults.on_nan=skip": "faults.max_skipped_steps and faults.on_repeated say",
    "why nosuch": "/runs, which has no runs; set --root",
    "train digits --config-name digits": "write a recipe or a YAML file without an option",
    "train digits --root here": "write run.root=here",
    "fit --model digits": "unknown command 'fit'; use train",
    "sbatch job.sbatch": "unknown command 'sbatch'; use submit",
    "help train": "`rollcall COMMAND --help` its options",
    "logs": "required: RUN; `rollcall status` lists the runs",
    "submit --local 'python ok.py'": "put `--` before it: rollcall submit --local -- ok.py",
    "submit --local 'torchrun --nproc_per_node 2 ok.py'": "rollcall submit --local -- ok.py",
    "submit --local -- 'python ok.py'": "python: rollcall starts the ranks itself; write only the",
    "submit --local -- job.sbatch": "job.sbatch is a shell script, not a program of Python",
    "submit --local -- -m ok.py": "-m ok.py: it is a file, not a module; remove -m",
    "submit --local --env A=1 -- ok.py": "export the variable before the command",
    "submit --local --conda mine -- ok.py": "activate it before the command",
    "submit --local --master_port 1 -- ok.py": "the launcher sets it, so leave it out",
    "submit --local -- mpirun -np 2 ok.py": "mpirun: rollcall starts the ranks itself",
    "submit --local -- bash job.sbatch": "bash: rollcall starts the ranks itself",
    "submit --local --cpus none -- ok.py": "--cpus-per-task: expected a whole number",
    "submit --local --workdir x -- ok.py": "a run works in the copy of its code",
    "submit --local --follow -- ok.py": "`rollcall submit --wait` shows the output",
    "train digits --verbose": "every step of progress is shown with log.every=1",
    "train digits --dry-run": "--print-config` prints the configuration",
    "train digits.yaml": "'digits' without directory and suffix is a recipe",
    "--nodes 2": "unknown command '--nodes'; `rollcall --help` lists the commands",
    "status --everything": "unrecognized arguments: --everything; expected only RUN, --root",
    "submit --local --root /proc/x -- ok.py": "; --root chooses another directory",
    "submit --local --root ok.py -- ok.py": "error: --root: ",
    "submit --local --name 'a b' -- ok.py": "error: --name: expected letters, digits and . _ -",
    "submit --local -- notes.txt": "notes.txt:1: SyntaxError: invalid syntax; correct it, or name",
    "submit --local digits --optim-lr 1": "write optim.lr=1 (peak learning rate)",
    "train digits --data_path here": "write data.path=here (",
    "train digits --fp16": "write precision=fp16 (",
    "train digits bf16=true": "unknown key 'bf16': use precision=bf16 (",
    "train data.name=tokens data.path=runs model.name=gpt": "data.path=runs: expected a directory "
    "with train.bin and val.bin",
    "train data.name=folder data.path=ok.py model.name=cnn": "=ok.py: expected a directory with a "
    "directory of images for each class",
    "train data.name=text model.name=transformers": "model.args.base: transformers needs this "
    "argument (a model type such as llama, a config.json, or a folder that holds one); set it, ",
    "train gpt model.num_heads=7": "model.hidden_size=128: expected a multiple of 14, twice "
    "model.num_heads; choose 140",
    "train data.name=jsonl data.path=notes.txt model.name=gpt": "needs data.args.tokenizer, the "
    "folder of a tokenizer",
    "train digits train.evaluate_every=none": "evaluate_every: expected a number or null, got",
    "train digits data.name=text data.path=gone": "/gone does not exist; expected the path of",
    "train digits data.name=text data.path=~/gone": "write the whole path: shells do not",
    "train digits model.init=none.safetensors": "no such file, folder or run; expected a .saf",
    "train digits model.name=broken:Net": "importing broken fails at",
    "train digits parallel.mesh=tensor=2": "needs 2 ranks, but got 1; start that number",
    "lint none.sbatch": "No such file or directory; expected an sbatch script",
    "sweep submit none.yaml": "No such file or directory; expected a YAML file with lines of key",
    "submit --local --nodes 2-8 -- ok.py": "has a fixed number of nodes; write --nodes 8",
    "submit --local --begin=tomorow -- ok.py": "--begin: expected a time such as 16:00",
    "submit --local --mail-type=FAILURE -- ok.py": "expected NONE, BEGIN, END, FAIL",
    "submit --local --dependency=afterok:x -- ok.py": "expected afterok:JOB, afterany",
    "submit --local --exclusive=no -- ok.py": "--exclusive: expected no value, or user",
    "submit --local --ntasks-per-core=x -- ok.py": "--ntasks-per-core: expected a number such as 1",
    "submit --lokal -- ok.py": "rollcall submit or of sbatch, did you mean '--local'?",
    "submit --timeout 5 -- ok.py": "did you mean '--time'?",
    "sweep cancel rates.yaml": "`rollcall cancel` is a command of its own",
    "train 'digits train.steps=2'": "write the words apart, without quotes",
    "train digits train.steps=9999999999999999999": "train.steps: expected a number below 9.2",
    "train digits wandb=true": "unknown key 'wandb': use log.to=wandb (",
    "train digits patience=3": "unknown key 'patience': use train.stop_after (",
    "train --recipe digits": "unknown option --recipe; write a recipe or a YAML file without an",
    "restart run": "unknown command 'restart'; a run resumes if you repeat its command",
    "status --root nosuch": "/nosuch is not a folder; expected the one with the runs",
    "accept --only nosuch": "--only: write it after `--`, as in rollcall accept [options of",
    "train ./runs": "runs: cannot be read: it is a directory; expected a YAML file",
    "network nosuch": "nosuch: expected rollcall network [options of rollcall submit] -- [--sizes]",
    "accept digits": "digits: expected rollcall accept [options of rollcall submit] -- [--only]",
    "train help": "'help': write --help, or --help KEY",
    "train digits ~optim.lr": "did you mean optim.lr=...?",
    "train dotted.yaml indent.yaml": "got 'dotted.yaml' and 'indent.yaml'; leave",
    "train dotted.yaml": "'train.steps': expected a section with keys in a file, train: {",
    "train indent.yaml": "line 3, column 10: indent the keys of a section alike",
    "train includes.yaml": "unknown key 'defaults': a recipe includes no other file",
    "train latin.yaml": "latin.yaml: not valid YAML: expected text in UTF-8, got other bytes",
    "train ./nope.yaml": "expected the path of a YAML file, or a recipe: digits, gpt, mnist",
    "train digits --gpu 0": "write CUDA_VISIBLE_DEVICES=0,1 before the command",
    "train digits --output out": "write run.root=out",
    "init": "unknown command 'init'; train --print-config > mine.yaml writes a recipe",
    "delete old": "unknown command 'delete'; delete the run's directory: rm -r runs/RUN",
    "config": "unknown command 'config'; use explain",
    "tensorboard": "unknown command 'tensorboard'; use dashboard",
    "logs run --rank zero": "--rank: expected a whole number, got 'zero'",
    "logs run other": "unrecognized arguments: other; expected only RUN, --",
    "profile run --steps": "--steps: expected a value",
    "sweep": "the following arguments are required: COMMAND; choose submit, status",
    "sweep statsu sweep.yaml": "COMMAND: expected one of submit, status; got 'statsu', did you",
    "drill run": "required: WHAT; choose preempt, time-limit, kill-rank",
    "drill run explode": "WHAT: expected one of preempt, time-limit, kill-rank",
    "checkpoint export run": "required: target, a name that ends in .safetensors",
    "checkpoint export run x --fromat hf": "--fromat hf, did you mean '--format'?",
    "checkpoint show run --newest": "unrecognized arguments: --newest; expected only path",
    "checkpoint show run 7": "unrecognized arguments: 7; expected only path (",
    "checkpoint export run x --step 7": "expected only path, target, --all, --best",
    "submit --host": "rollcall: error: --host: expected a value",
    "submit --local --nodes -1 -- ok.py": "expected a whole number of at least 1, not '-1'",
    "submit --local --num_processes 4 -- ok.py": "`rollcall submit --gpus-per-node N` or",
    "submit --local --hostfile hosts -- ok.py": "`rollcall submit --nodes N`",
    "lint": "required: FILE, an sbatch script (",
    "sweep status": "required: file, the sweep's YAML file (",
    "train net.py --lr 0.1": "net.py is code, not a recipe",
    "train net:net": "'net:net' is not a recipe; write model.name=net:net",
    "train digits log.to=nosuch:Logger": "install the package, for example with env/run --with nos",
    "predict fine --output a.jsonl": "has a config.yaml, as a run of a training has; `",
    "tokenize ok.py": "required: --tokenizer, --output",
    "doctor gpu": "unrecognized arguments: gpu; expected only --all",
    "explain optim.lrr": "expected a recipe, not a key, did you mean 'optim.lr'? --help KEY",
    "bench": "expected the name of a benchmark; choose speedup, overhead",
    "checkpoint lst run": "got 'lst', did you mean 'list'?",
    "generate run": "one of the arguments --prompt --tokens --chat is required",
    "generate run --prompt x --max_new_tokens 5": "--max_new_tokens 5; expected only RUN, --best",
    "generate run --prompt x --length 0": "error: --length: expected at least 1, got 0\n",
    "generate run --prompt x --temperature nan": "temperature: expected at least 0, got nan\n",
    "predict run --split test": "--split: expected one of train, validation; got 'test'",
    "submit --local --framework jaxx -- ok.py": "mpi, ray; got 'jaxx', did you mean 'jax'?",
    "submit --local --resume run -- ok.py": "; --resume takes no value, --name RUN names it",
    "submit --local --with timm -- ok.py": "write it before the command: ./env/run --with",
    "submit --local --link nope -- ok.py": "--link nope: no such file or directory in ",
    "submit --local -- A=1 ok.py": "A=1: write variables before `rollcall`; expected a script",
    "submit --local -- 'ok.py --lr 1'": "ok.py --lr 1: remove the quotes; expected a script",
    "submit --local -- .": ".: a directory; expected a script",
    "train momentum.yaml": "momentum.yaml: optim.momentum is an option of optim.name=sgd",
    "train momentum.yaml optim.name=sgd data.name=folder": "error: data.name=folder needs",
    "train digits run.root=ok.py/runs": "ok.py is a file; choose a folder",
    "lint dotted.yaml": "dotted.yaml is not an sbatch script: expected #!/bin/bash",
    "lint ok.py": "ok.py is not an sbatch script",
    "report fine -o gone/x.html": "cannot write gone/x.html: run mkdir -p gone first",
    "generate fine --prompt x": "as a run of a training has; `rollcall status` lists all runs",
    "submit --doctor --json=1": "--json: expected no value, got '1'",
    "submit --local --gpus 1 -- ok.py": "would need 1 GPU, and this machine has none; remove",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, errors="surrogateescape")
    (tmp_path / "runs" / "fine").mkdir(parents=True)  # of a script
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def runs(place: Path) -> Path:
    for name in ("script/job", "begun", "trained/checkpoints/step-00000002"):
        (place / "runs" / name).mkdir(parents=True)
    JobRecord("runs/script", 1, is_training=False).write(place / "runs" / "script")
    for name in ("begun", "trained"):
        (place / "runs" / name / "config.yaml").write_text("train: {steps: 2}\n")
    return place / "runs"


@pytest.mark.parametrize("line", ANSWERS)
@pytest.mark.usefixtures("place")
def test_one_line_names_the_thing_and_the_remedy(
    line: str, capsys: pytest.CaptureFixture[str], answer: str = ""
) -> None:
    try:
        code = cli.main(shlex.split(line))
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1
    assert (answer or ANSWERS[line]) in said


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("train digits run.name=script", "runs/script is the run of a script; choose another name"),
        ("train --ranks 2 digits run.name=script", "runs/script is the run of a script"),
        ("predict trained --input none.png", "--input: no file matches 'none.png'; name a file"),
        ("predict begun", "runs/begun has no checkpoint yet; train it first"),
    ],
)
def test_what_runs_have_is_known_before_torch(
    line: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    test_one_line_names_the_thing_and_the_remedy(line, capsys, answer)


def test_a_script_may_train_in_its_own_run(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLCALL_RUN_DIR", str(runs / "script"))
    assert cli.main(["train", "digits", "run.name=script", "data.path=none"]) == 2
    assert "none does not exist; expected" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["status", "train digits", "submit --local -- ok.py"])
def test_a_deleted_directory_is_named(
    line: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "gone").mkdir()
    monkeypatch.chdir(place / "gone")
    (place / "gone").rmdir()
    assert cli.main(line.split()) == 2
    said = capsys.readouterr().err
    assert said.splitlines()[-1] == (
        "rollcall: error: the current directory was deleted; change to one that exists"
    )


@pytest.mark.usefixtures("runs")
def test_an_output_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        contextlib.suppress(OSError),  # closing the file fails, too
        Path("/dev/full").open("w", buffering=1) as full,
        contextlib.redirect_stdout(full),
    ):
        assert cli.main(["status"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("rollcall: error: the output: No space left on device; free some space")


def test_help_is_shown_beside_a_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--ranks", "4", "--help"]) == 0
    assert "Usage: rollcall train" in capsys.readouterr().out
    assert cli.main(["train", "--nproc_per_node", "2", "--help", "optim.lr"]) == 0
    assert capsys.readouterr().out.startswith("optim.lr ")


def test_lint_says_what_it_has_read(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lint", "job.sbatch", "python.sbatch"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "job.sbatch: no findings",
        "python.sbatch: no findings in #SBATCH lines, the rest is not a shell script",
    ]
    (place / "bad.sbatch").write_text("#!/bin/bash\n#SBATCH --gpu-per-node=1\n")
    assert cli.main(["lint", "bad.sbatch"]) == 1


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("--nproc_per_node=2 -m rollcall.train digits train.step=5", "did you mean 'train.steps'?"),
        ("--nproc_per_node 2 -m train run.name=script", "runs/script is the run of a script"),
        ("--nproc-per-node=3 -m train parallel.mesh=tensor=2", "needs 2 ranks, but got 3; start"),
        ("--nproc_per_node=2 -m train --ranks 2", "--ranks: a launcher starts the ranks already"),
        ("--nproc_per_node=2 -m train model.init=none.pt", "no such file, folder or run; expected"),
        ("--nproc_per_node=two -m train", "=two: expected a number of ranks, cpu, gpu or auto"),
        ("--nproc_per_node=2 -m rollcall.trian", "the module is neither in"),
        ("--nnodes 2 --nproc_per_node=3 -m train parallel.mesh=tensor=2", "torch is imported"),
        ("--nproc_per_node=2 script.py -m train train.step=5", "torch is imported"),
        ("--nproc_per_node=2 -m train predict none", "torch is imported"),
    ],
)
def test_torchrun_refuses_words_before_it_imports_torch(
    line: str, answer: str, runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    ended = subprocess.run(
        [sys.executable, ROOT / "env" / "bin" / "torchrun", *shlex.split(line)],
        cwd=runs.parent,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert answer in ended.stderr and ended.returncode == (1 if answer[:5] == "torch" else 2)
