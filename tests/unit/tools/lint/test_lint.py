"""Each rule of lint on a script that breaks it and on one that does not, and on whole scripts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import lint_corpus
import pytest
from checkout import ROOT

from rollcall.tools.lint import RULES, main, name
from rollcall.tools.lint.script import Script

SCRIPTS = Path(__file__).parent / "scripts"
OUR_OWN = [*ROOT.glob("slurm/*.sbatch"), *ROOT.glob("tests/unit/launch/scheduler/golden/*.sbatch")]
CORRECT = [*SCRIPTS.glob("*.good.sbatch"), *SCRIPTS.glob("whole-*.sbatch"), *OUR_OWN]
OTHER_FORMS = [
    ("unknown-option", "#SBATCH --walltime=1:00:00"),
    ("unknown-option", "#SBATCH --tiem=1:00:00"),
    ("unknown-option", "#SBATCH -j name"),
    ("short-time", "#SBATCH -t 2h"),
    ("short-time", "#SBATCH -t 04:00 -N 1"),
    ("output-directory", "#SBATCH -o $HOME/logs/%j.out"),
    ("output-directory", "#SBATCH -e nowhere/%x-%j.err"),
    ("requeue-truncates", "scontrol requeue $SLURM_JOB_ID"),
    ("rank-in-batch-shell", "#SBATCH -N 2\nexport NODE_RANK=${SLURM_NODEID:-0}"),
    ("rank-in-batch-shell", "#SBATCH -N 2\ncat >run.sh <<END\nsay 'it\nrank=$SLURM_PROCID\nEND"),
    ("wrapper-without-exec", "#SBATCH --signal=TERM@9\nsrun bash wrapper.sh --flag"),
    ("wrapper-without-exec", "#SBATCH --signal=TERM@9\nsrun bash -c 'cd a && python b.py'"),
    ("signal-to-nobody", "#SBATCH --signal=USR1@60\ntrap save USR1\nsrun python train.py"),
    ("signal-to-nobody", "#SBATCH --signal=B:12@60\nsrun python train.py"),
    ("signal-to-nobody", "#SBATCH --signal=SIGUSR2@60\npython train.py"),
    ("signal-kills-torchrun", "#SBATCH --signal=B:USR1@60\nexec srun torchrun train.py"),
    ("fixed-port", "srun torchrun --master_port 29500 train.py"),
    ("fixed-port", "H=$(a b)\nsrun torchrun --rdzv_endpoint $H:29500 --rdzv_id $RANDOM train.py"),
    ("node-count", "N=4\nsrun python -m torch.distributed.run --nnodes $N train.py"),
    ("hidden-exit-code", "torchrun --standalone train.py |& tee log"),
    ("gpu-count", "#SBATCH --gres=gpu:a100:4\nsrun torchrun --nproc_per_node 2 train.py"),
    ("tasks-mismatch", "#SBATCH --nodes=2 --ntasks=8\nsrun torchrun --nnodes $N train.py"),
    ("tasks-mismatch", 'RUN="torchrun --nnodes=$N train.py"\nsrun -N 2 -n 4 bash -c "$RUN --fast"'),
    ("without-srun", "#SBATCH -N2\npython -m torch.distributed.run train.py"),
    ("fixed-port", "accelerate launch --main_process_port 29500 train.py"),
    ("node-count", "#SBATCH -N 2\nsrun torchrun --rdzv_id $ID --rdzv_endpoint $E train.py"),
    ("local-address", "#SBATCH -N 2\nsrun torchrun --nnodes=$N --master_addr=127.0.0.1 train.py"),
    ("gpu-count", "#SBATCH --gpus-per-node=1\nCUDA_VISIBLE_DEVICES=1 python train.py"),
    ("hidden-exit-code", "for n in 1 2; do python train.py $n; done\ndate"),
    ("hidden-exit-code", "python train.py &\nwait"),
    ("without-srun", "#SBATCH -N 2\naccelerate launch --num_machines 2 train.py"),
    ("without-srun", "#SBATCH -N 2\ndeepspeed train.py"),
    ("without-srun", "#SBATCH -N 4 -n 16\nmodule load cuda\npython train.py"),
    ("without-srun", "#SBATCH --ntasks-per-node=4 --gres=gpu:4\npython -u train.py"),
    ("without-srun", "#SBATCH -N 2\nrun() {\n    python train.py\n}\nrun"),
    ("missing-wait", "srun python train.py &"),
    ("missing-wait", "(cd here; python train.py) &\necho started"),
    ("short-time", "#SBATCH --time=24"),
    ("short-time", "#SBATCH --time=180  # 180 hours"),
    ("small-memory", "#SBATCH --mem-per-gpu=80"),
    ("rank-by-hand", "#SBATCH -N 2 --ntasks-per-node=2\nexport RANK=0\nsrun python train.py"),
    ("hidden-exit-code", "cd here || exit 1\npython train.py\necho end"),
    ("hidden-exit-code", "python train.py || true"),
    ("hidden-exit-code", "set -e\nset +e\npython train.py\necho end"),
    ("hidden-exit-code", "{\n    python train.py\n} | tee log"),
    ("hidden-exit-code", "python train.py\nexit 0"),
    ("hidden-exit-code", "if [ $1 ]; then\n    python train.py\nelse\n    ls\nfi\necho end"),
    ("gpu-count", "#SBATCH -N 1 --gpus-per-task=8 -n 1\ntorchrun --nproc_per_node 4 train.py"),
    ("gpu-count", "#SBATCH -G 2 -N 1\naccelerate launch --num_processes 4 train.py"),
    ("gpu-count", "export CUDA_VISIBLE_DEVICES=0,1\ntorchrun --nproc_per_node 8 train.py"),
    ("gpu-count", "#SBATCH --gres=gpu:4\ntorchrun --nproc_per_node 2 train.py &\nwait $!"),
    ("unset-variable", "#SBATCH -N 1\nDATA_ROOT=/data\npython train.py --data $DATA_ROT"),
    ("fixed-port", "torchrun a.py &\ntorchrun b.py &\nwait $!"),
    ("tasks-mismatch", '#SBATCH -N 2 -n 8\nA="torchrun"\nA="$A train.py"\nsrun $A --nnodes $N'),
]
NO_MISTAKES = [
    "#SBATCH --nodes={{ nodes }} --{{ kind }}\n{% if fast %}\nsrun python train.py\n{% endif %}",
    "#SBATCH --account=<your account>\ncd <the directory>\npython train.py",
    "#SBATCH -N 2\ntext=$(cat <<'END'\nrank=$SLURM_PROCID\nEND\n)\nsrun bash -c \"$text\"",
    "#SBATCH --image=docker:image --module=gpu\nsrun shifter python train.py",
    "#SBATCH --gres=gpu:1\nset -e\npython train.py\ndate",
    "python train.py || exit 1\ndate",
    "#SBATCH -c 8\nsrun python train.py",
    "#SBATCH --gpus-per-node=8\nMASTER_PORT=29500 python train.py",
    "#SBATCH --time={TIME} --output={{ folder }}/out\npython train.py",
    "python train.py\npython evaluate.py",
    "python -m pip install torch\ndate",
    'A="--lr 1\n--steps 2\n"\nL="python train.py\n"\nsrun bash -c \'$L --rank $SLURM_PROCID $A\'',
    "#SBATCH -N 1\necho $SLURM_NODEID",
    "#SBATCH -N 2\nsrun torchrun --no-python $OPTIONS train.sh",
    "#SBATCH --nodes=0 --ntasks=4\nsrun torchrun train.py",
    "#SBATCH --time=30  # minutes\n#SBATCH --mem=64000\npython train.py",
    "#SBATCH -N 2\nfor h in a b; do ssh $h torchrun --nnodes 2 train.py & done\nwait",
    "#SBATCH -N 2\nsrun ray start --block &\nsleep 9\npython train.py",
    "#SBATCH -N 2\nmpirun python train.py",
    "if [ $# = 1 ]; then N=2; else N=4; fi\ntorchrun --nproc_per_node $N --standalone t.py",
    "#SBATCH -N 1\nfor ((n = 0; n < 3; n++)); do python t.py $n; done\nread -r aa bb <x\nls $bb",
    "if srun python train.py; then echo good; else exit 1; fi",
    "#SBATCH --gres=gpu:4\nCUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 a.py &\nwait $!",
    "if [ $1 ]; then\n    python train.py\nelse\n    echo nothing\nfi",
    "case $1 in\na) python train.py ;;\nb) echo b ;;\nesac",
    "#SBATCH -N 2\n/usr/bin/time srun python train.py",
    "#SBATCH -J { jobname }\npython train.py",
    "#SBATCH -N 2 -n 4\nexport WORLD_SIZE=$((SLURM_NNODES * 2))\nsrun python train.py",
    "#SBATCH --ntasks-per-node=²\nsrun torchrun --nnodes=² --nproc-per-node=² train.py",
]
"""Lines in which an earlier version of lint found mistakes, or could."""


@pytest.fixture(autouse=True)
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have sinfo name a version, by default one to which all rules apply."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def write(version: str) -> None:
        (folder / "sinfo").write_text(f"#!/bin/sh\necho slurm {version}\n")
        (folder / "sinfo").chmod(0o755)

    write("22.05.9")
    return write


def findings(path: Path) -> list[tuple[str, int]]:
    script = Script(path, path.read_bytes().decode())
    return [(name(rule), finding.line) for rule in RULES for finding in rule(script)]


@pytest.mark.parametrize("rule", [name(rule) for rule in RULES])
def test_a_rule_finds_its_mistake_at_its_line_and_nothing_else(rule: str) -> None:
    bad = SCRIPTS / f"{rule}.bad.sbatch"
    lines = bad.read_text().splitlines()
    expected = [(rule, number) for number, line in enumerate(lines, 1) if "# BAD" in line]
    assert expected
    assert findings(bad) == expected


def test_no_rule_is_forgotten_in_the_tables() -> None:
    names = {path.name.removesuffix(".bad.sbatch") for path in SCRIPTS.glob("*.bad.sbatch")}
    assert names == {name(rule) for rule in RULES}


@pytest.mark.parametrize("path", CORRECT, ids=lambda path: path.name)
def test_a_correct_script_has_no_findings(path: Path) -> None:
    assert findings(path) == []
    assert Script(path, path.read_text()).unbalanced is None  # so all rules have seen it


@pytest.mark.parametrize(("rule", "lines"), OTHER_FORMS)
def test_a_rule_knows_other_forms_of_its_mistake(tmp_path: Path, rule: str, lines: str) -> None:
    (tmp_path / "wrapper.sh").write_text("#!/bin/bash\npython train.py\n")
    script = tmp_path / "job.sbatch"
    script.write_text(f"#!/bin/bash\n{lines}\n")
    assert [found for found, _ in findings(script)] == [rule]


@pytest.mark.parametrize("lines", NO_MISTAKES)
def test_what_is_no_mistake(tmp_path: Path, lines: str, slurm: Callable[[str], None]) -> None:
    slurm("24.11.1")
    script = tmp_path / "job.sbatch"
    script.write_text(f"#!/bin/bash\n{lines}\n")
    assert findings(script) == []
    assert Script(script, script.read_text()).unbalanced is None


def test_without_bash_an_unbalanced_quote_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert findings(SCRIPTS / "syntax-error.bad.sbatch") == [("syntax-error", 8)]


def test_the_command_shows_place_reason_and_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = SCRIPTS / "unknown-option.bad.sbatch"
    assert main([str(SCRIPTS / "unknown-option.good.sbatch")]) == 0
    assert capsys.readouterr().out == ""
    assert main([str(bad)]) == 1
    assert capsys.readouterr().out == (
        f"{bad}:3: sbatch has no option --gpu-per-node, did you mean '--gpus-per-node'?\n"
        "    fix: correct the name; `sbatch --help` lists the options, including your site's own"
        " [unknown-option]\n"
    )
    (tmp_path / "image.sif").write_bytes(b"\xff\x00")
    for unreadable in ("image.sif", "missing.sbatch", "."):
        assert main([str(tmp_path / unreadable), str(bad)]) == 2
        assert "cannot be read: " in capsys.readouterr().err


def test_functions_that_call_themselves_and_long_numbers_end(tmp_path: Path) -> None:
    nested = "if true; then\n" * 12 + "f; g0; g0\n" + "fi\n" * 12
    chain = "".join(f"g{n}() {{ g{n + 1}; g{n + 1}; }}\n" for n in range(40))
    text = f"#!/bin/bash\n#SBATCH --nodes={'9' * 5000}\nf() {{\n{nested}}}\n{chain}f\n"
    (tmp_path / "a.sbatch").write_text(text)
    assert main([str(tmp_path / "a.sbatch")]) in (0, 1)


def test_the_small_corpus_has_no_findings_and_shows_planted_mistakes() -> None:
    """A share for CI of the campaign, which measures a folder of public scripts."""
    scripts = sorted(Path(__file__).parent.glob("share/*.sbatch"))
    result = lint_corpus.measure(scripts, lint_corpus.VERDICTS, frozenset({"unjudged", "missed"}))
    assert (result.right, result.wrong, result.unjudged) == (0, 0, 0)
    assert result.planted.total() > 100
    assert result.recall >= lint_corpus.RECALL
    assert set(result.planted) >= set(lint_corpus.PLANTS) - {"hours and minutes"}


def test_the_documented_table_has_every_rule() -> None:
    page = (ROOT / "docs" / "templates.md").read_text()
    table = re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", page, re.MULTILINE)
    assert table == [(name(rule), (rule.__doc__ or "").strip()) for rule in RULES]
