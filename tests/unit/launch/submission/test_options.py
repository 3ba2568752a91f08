"""Options of a submission: GPUs in all notations, SBATCH_* variables, plugins, a forgotten `--`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

from rollcall.launch.scheduler import gpus
from rollcall.launch.submission.options import read
from rollcall.messages.refusal import RefusedError
from rollcall.tools.accept import command as accept
from rollcall.tools.lint import check
from rollcall.tools.lint.script import Script

SINFO = """main*|3|1-infinite|1:00:00|up|4|8000|(null)|UNLIMITED
gpu|2|1-infinite|1:00:00|up|96|512000|gpu:a100:8(S:0-1)|UNLIMITED
gpu|2|1-infinite|1:00:00|up|64|512000|gpu:a100:4|48
mixed|2|1-infinite|1:00:00|up|64|512000|gpu:a100:2(S:0),gpu:v100:6(S:1),shard:8|UNLIMITED"""
HELP = """Usage: sbatch [OPTIONS(0)...] [ executable [args(0)...]]

  -a, --array=indexes         job array index values

Options provided by plugins:
      --image=image           image to use, as with --images
      --ccm                   compatibility mode
      --queues=list           queues"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a script, on a machine whose Slurm has these partitions and plugins."""
    for name, text in {"sinfo": SINFO, "sbatch": HELP}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "fit.py").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    for name in [name for name in os.environ if name.startswith("SBATCH_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dry_run(*words: str) -> tuple[dict[str, str], str]:
    """Return the job's options by name, and all that is printed."""
    command = [sys.executable, f"{ROOT}/launch/submit.py", "--dry-run", "--name=a", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", done.stdout, re.MULTILINE)
    return dict(found), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", {"": 4}),
        ("a100:4,v100:2", {"a100": 4, "v100": 2}),
        ("two", None),
        ("0", None),
        ("4:a100", None),
        ("2,", None),
    ],
)
def test_gpus_of_an_option(text: str, expected: dict[str, int] | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match=f"expected a number of GPUs.*, not '{text}'"):
            gpus.of_option(text)
    else:
        assert gpus.of_option(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu", {"": 1}),
        ("gpu:a100", {"a100": 1}),
        ("gpu:1g.5gb:2", {"1g.5gb": 2}),
        ("gpu:a100:4(S:0-1),gpu:h100:2,shard:8", {"a100": 4, "h100": 2}),
        ("cpu=3,gres/gpu:a100=2,gres/gpu=1", {"a100": 2, "": 1}),
        ("(null)", {}),
        ("gpus_tmp:3,tmpfs:10G", {}),
    ],
)
def test_gpus_among_resources(text: str, expected: dict[str, int]) -> None:
    assert gpus.of_resources(text) == expected


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("words", "asked", "cpus"),
    [
        ("-p gpu --gres=gpu:2", {"gres": "gpu:2"}, 24),
        ("-p gpu --gres gpu:a100:8", {"gres": "gpu:a100:8"}, 96),
        ("-p gpu --gpus-per-node a100:4", {"gpus-per-node": "a100:4"}, 48),
        ("-p gpu --nodes 2 --gpus a100:8", {"gpus-per-node": "a100:4"}, 48),
        ("-p gpu -G 4", {"gpus-per-node": "4"}, 48),
        ("-p gpu --gpus-per-task 2", {"gpus-per-node": "2"}, 24),
        ("-p gpu --gpus-per-node 2 --cpus-per-gpu 5", {"gpus-per-node": "2"}, 10),
        ("-p gpu --gpus-per-node 2 -c 7", {"gpus-per-node": "2"}, 7),
        ("-p mixed --gpus-per-node v100:3", {"gpus-per-node": "v100:3"}, 24),
        ("-p gpu --gpus-per-node 16", {"gpus-per-node": "16"}, 16),  # sbatch refuses it
        ("-p main", {}, 2),
    ],
)
def test_gpus_bring_their_share_of_the_cpus(words: str, asked: dict[str, str], cpus: int) -> None:
    options, shown = dry_run(*words.split(), "--", "fit.py")
    assert asked.items() <= options.items(), shown
    assert options.get("cpus-per-task") == str(cpus), shown
    assert not {"gpus", "gpus-per-task", "cpus-per-gpu"} & options.keys()


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nodes 2 --gpus 3", "--gpus 3: nodes need equal numbers of GPUs"),
        ("--nodes 1-2 --gpus 2", "--gpus 2: nodes need equal numbers of GPUs"),
        ("--gpus 2 --gpus-per-node 4", "--gpus-per-node and --gpus: give only one of them"),
        ("--gres gpu:2 --gpus-per-node 4", "both ask for GPUs: give only one of them"),
        ("--nproc-per-node 1,2", "1,2 has numbers for 2 nodes, and the run has 1"),
        ("--nproc-per-node 1,2 --spares 1 --nodes 2", "nodes that come and go"),
        (": --name=b", "--name: for all nodes alike; write it before the first `:`"),
        (": --nodes 1-2", "groups of nodes have fixed numbers of nodes"),
        ("--preflight : --nodes 2", "--preflight: takes one group of nodes"),
        ("--doctor : --nodes 2", "--doctor: takes one group of nodes"),
        ("--spares 1 : --nodes 2", "--spares: takes one group of nodes"),
        ("--gpus four", "--gpus: expected a number of GPUs"),
        ("--cpus-per-gpu 4", "--cpus-per-gpu 4: expected a number, and GPUs to go with"),
        ("--ntasks-per-gpu 1", "--ntasks-per-gpu: use --gpus-per-node"),
        ("--sbatch-arg=--output=x", "--output: a run keeps its output in its directory"),
        ("--sbatch-arg=image", "--sbatch-arg: expected --OPTION"),
        ("--sbatch-arg=--=x", "--sbatch-arg: expected --OPTION"),
        ("--walltime 3", "not an option of rollcall submit or of sbatch, did you mean '--time'?"),
        ("--volume=x", "pass an option of a plugin on with --sbatch-arg=--volume"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(words: str, message: str) -> None:
    assert message in dry_run(*words.split(), "--", "fit.py")[1]


def test_variables_of_sbatch_count_between_profile_and_command_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "clusters").mkdir()
    profile = "options: {partition: main, account: mine, qos: low, mem-per-cpu: 1G, requeue: true}"
    (place / "clusters" / "here.yaml").write_text(profile)
    given = {"PARTITION": "gpu", "QOS": "high", "TIMELIMIT": "7", "MEM_PER_NODE": "3G"}
    given |= {"GRES": "gpu:2", "NO_REQUEUE": "1", "OUTPUT": "x", "JOB_NAME": "x", "UNKNOWN": "x"}
    for name, value in given.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    options, shown = dry_run("--cluster=here", "-t9", "--gpus-per-node=4", "--", "fit.py")
    rows = dict(re.findall(r"^# --(\S+) +(.+)$", shown, re.MULTILINE))
    expected = {
        "partition": ("gpu", "SBATCH_PARTITION"),
        "account": ("mine", "profile here"),
        "qos": ("high", "SBATCH_QOS"),
        "time": ("9", "command line"),
        "mem": ("3G", "SBATCH_MEM_PER_NODE"),
        "no-requeue": ("", "SBATCH_NO_REQUEUE"),
        "gpus-per-node": ("4", "command line"),
        "job-name": ("a", "command line"),
        "nodes": ("1", "default"),
    }
    assert {name: (options[name], rows[name]) for name in expected} == expected
    assert not {"mem-per-cpu", "requeue", "gres"} & options.keys()
    assert "SBATCH_OUTPUT has no effect: a run keeps its output in its directory" in shown
    assert "SBATCH_JOB_NAME has no effect" in shown
    assert accept.main(["--dry-run"]) == 0
    assert capsys.readouterr().err.count("SBATCH_OUTPUT has no effect") == 1
    monkeypatch.setenv("SBATCH_TIMELIMIT", "2h")
    assert "SBATCH_TIMELIMIT: --time: '2h' is not a valid" in dry_run("--", "fit.py")[1]


@pytest.mark.parametrize("words", ["--gres=gpu:2,tmp:1", "-G2", "--gpus-per-node=v100:2"])
def test_gpus_of_the_command_line_replace_those_of_a_profile(place: Path, words: str) -> None:
    (place / "clusters").mkdir()
    for asked in ("gpus-per-node: 4", "gres: 'gpu:a100:4'"):
        (place / "clusters" / "here.yaml").write_text(f"options: {{{asked}}}")
        options, shown = dry_run("--cluster=here", words, "--", "fit.py")
        assert {"4", "gpu:a100:4"}.isdisjoint(options.values()) and options, shown


@pytest.mark.usefixtures("place")
def test_options_of_plugins_are_passed_on() -> None:
    options, shown = dry_run(
        *("--image", "x:1", "--ccm", "--sbatch-arg=--own=a b", "--sbatch-arg=--qos=high"),
        *("--sbatch-arg=--requeue=expedite", "--", "fit.py"),
    )
    expected = {"image": "x:1", "ccm": "", "own": "'a b'", "qos": "high", "requeue": "expedite"}
    assert expected.items() <= options.items(), shown
    assert shown.count("#SBATCH --requeue") == 1


def test_lint_leaves_options_of_plugins_alone(place: Path) -> None:
    def found(option: str) -> bool:
        script = Script(place / "a.sbatch", f"#!/bin/bash\n#SBATCH {option}\nsrun hostname\n")
        return any("sbatch has no option" in line for line in check(script))

    for option in ("--image=x", "--module=gpu", "--ccm", "--queues=x", "--{{ key }}=x"):
        assert not found(option)
    for option in ("--partiton=x", "---gres=gpu:1", "--walltime=3", "--queue=x", "-j x"):
        assert found(option)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("words", "suggested"),
    [
        ("fit.py --lr 3", "-- fit.py --lr 3"),
        ("--nodes 2 fit.py seed=1", "--nodes 2 -- fit.py seed=1"),
        ("-N2 torchrun --nproc_per_node=4 fit.py --lr 3", "-N2 -- fit.py --lr 3"),
        ("--nodes 2 -m pkg.module --lr 3", "--nodes 2 -- -m pkg.module --lr 3"),
    ],
)
def test_a_script_without_dashes_is_told_what_to_type(words: str, suggested: str) -> None:
    shown = dry_run(*words.split())[1]
    typed = f"put `--` before it: rollcall submit --dry-run --name=a {suggested}\n"
    assert shown.endswith(typed), shown


@pytest.mark.usefixtures("place")
def test_values_that_look_like_scripts_are_values() -> None:
    options, shown = dry_run("--comment", "fit.py", "-m", "block:cyclic", "digits")
    assert (options["comment"], options["distribution"]) == ("fit.py", "block:cyclic"), shown
    assert "starts the ranks itself" in dry_run("--", "torchrun", "fit.py")[1]


def test_a_group_of_nodes_does_not_have_the_nodes_of_the_one_before() -> None:
    first = "--nodelist n1 --constraint a --gres gpu:2 --qos high"
    _, second, third = read(f"{first} : --nodes 2 : --constraint b".split()).groups
    assert second.passed == {"qos": "high"}
    assert third.passed == {"constraint": "b", "qos": "high"}


@pytest.mark.usefixtures("place")
def test_options_of_the_newest_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_CONSOLIDATE_SEGMENTS", "1")
    found, shown = dry_run("--spread-segments", "--container-type", "oci", "--", "fit.py")
    assert found["container-type"] == "oci" and "spread-segments" in found, shown
    assert found["consolidate-segments"] == ""  # an option without a value


def test_memory_that_sbatch_would_not_understand_is_refused() -> None:
    for value in ("64G", "64000", "1tb", "0"):
        assert read(["--local", f"--mem={value}"]).own.mem == value
    for value in ("lots", "-5", "1.5G", "64X"):
        with pytest.raises(RefusedError, match=f"--mem: expected .*, not '{re.escape(value)}'"):
            read(["--local", f"--mem={value}"])


def test_an_option_whose_value_is_optional_may_have_none() -> None:
    assert read(["--local", "--nice"]).passed == {"nice": None}
