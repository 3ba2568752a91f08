"""A site's profile: where it is found, who wins, what it becomes, how a wrong one is refused."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from rollcall.launch.commands import network
from rollcall.launch.scheduler.job import Job, render
from rollcall.launch.submission import layers, options
from rollcall.messages.refusal import RefusedError

PROJECT = """
options: {partition: gpu, time: 2:00:00, exclusive: true, srun-arg: [--label, --mpi=none]}
modules: [gcc/12, cuda]
environment: {NCCL_DEBUG: WARN, GREETING: it's $HOME}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a profile, and a user without one; we are inside the project."""
    (tmp_path / "project" / "clusters").mkdir(parents=True)
    (tmp_path / "project" / ".git").mkdir()
    (tmp_path / "project" / "deep").mkdir()
    (tmp_path / "user" / "rollcall" / "clusters").mkdir(parents=True)
    (tmp_path / "project" / "clusters" / "here.yaml").write_text(PROJECT)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path / "project" / "deep")
    return tmp_path


def users(place: Path, text: str) -> None:
    (place / "user" / "rollcall" / "clusters" / "here.yaml").write_text(text)


def test_a_profile_becomes_options_and_setup_lines(place: Path) -> None:
    words, setup = layers.load("here")
    line = options.read([*words, "--time=5"])
    assert (line.own.partition, line.own.time, line.passed) == ("gpu", "5", {"exclusive": None})
    assert options.read(words).own.time == "2:00:00"
    assert line.own.srun_arg == ["--label", "--mpi=none"]
    (place / "srun").write_text('#!/bin/sh\necho "$NCCL_DEBUG $GREETING"\n')
    (place / "srun").chmod(0o755)
    job = Job("a", 1, ("true",), str(place), "o", cpus_per_task=1, setup=setup)
    script = f"module() {{ echo {shlex.quote('module')} $*; }}\n{render(job)}"
    path = {"PATH": f"{place}:/bin:/usr/bin"}
    shown = subprocess.run(["bash"], input=script, capture_output=True, text=True, env=path)
    assert shown.stdout == "module load gcc/12 cuda\nWARN it's $HOME\n"


def test_the_users_file_wins_key_by_key(place: Path) -> None:
    users(place, "options: {partition: mine, exclusive: false}\nmodules: []\n")
    words, setup = layers.load("here")
    line = options.read(words)
    assert (line.own.partition, line.own.time, line.passed) == ("mine", "2:00:00", {})
    assert not any("module" in text for text in setup)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optons: {}", "here.yaml: unknown key 'optons', did you mean 'options'?"),
        (
            "options: {partiton: x}",
            "here.yaml: options: --partiton: not an option .* did you mean '--part",
        ),
        ("options: {nodes: two}", "here.yaml: options: --nodes: expected a whole number"),
        ("modules: gcc", "here.yaml: modules: expected a list of texts, found 'gcc'"),
        ("modules: [[gcc]]", "here.yaml: modules: expected a list of texts, found"),
        ("setup: [{a: b}]", "here.yaml: setup: expected a list of texts, found"),
        ("environment: {A: [1, 2]}", "here.yaml: environment: expected 'name: value' lines, found"),
        ("environment: {a b: 1}", "here.yaml: environment: 'a b' is not a valid variable name"),
        ("options: [", "here.yaml: not valid YAML"),
    ],
)
def test_a_wrong_profile_is_told_with_file_and_key(place: Path, text: str, message: str) -> None:
    users(place, text)
    with pytest.raises(RefusedError, match=message):
        layers.load("here")


@pytest.mark.usefixtures("place")
def test_an_unknown_cluster_is_told_with_those_that_there_are() -> None:
    with pytest.raises(RefusedError, match="no such profile; known profiles: here"):
        layers.load("there")


def test_the_sites_default_serves_all_who_name_no_cluster(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = place / "site"
    (site / "clusters").mkdir(parents=True)
    (site / "clusters" / "default.yaml").write_text("options: {partition: all, account: team}\n")
    monkeypatch.setattr(layers, "SITE", site)
    (place / "sbatch").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    (place / "user" / "rollcall" / "clusters" / "default.yaml").write_text("options: {account: me}")
    line, _ = layers.read([])
    assert (line.own.partition, line.passed) == ("all", {"account": "me"})
    assert line.origins["partition"] == "profile default"
    assert layers.read(["--local"])[0].own.partition is None
    assert layers.read(["--cluster=here"])[0].own.partition == "gpu"


def test_network_and_accept_use_the_root_of_a_profile_and_take_groups_of_nodes(place: Path) -> None:
    users(place, "options: {root: /scratch/runs}")
    assert network.read("network", ["--cluster=here"])[0].own.root == "/scratch/runs"
    line, _ = network.read("network", ["--nodes=1", ":", "--nodes=2"])
    assert line.own.root == str(Path("runs").absolute()) and len(line.groups) == 2
