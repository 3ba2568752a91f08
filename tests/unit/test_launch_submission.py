"""submit.py up to the moment of submitting: what it shows, refuses, copies and costs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch import executors, options, place, snapshot, start, submission
from launch.words import word
from train.config import parse
from train.run import RunDir, State, Verdict

ROOT = Path(__file__).parents[2]
SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]


def submit(
    *words: str, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SUBMIT, *words], cwd=cwd, env=os.environ | (env or {}), capture_output=True, text=True
    )


def test_dry_run_shows_script_and_code_and_writes_nothing(tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "sbatch"
    fake.parent.mkdir()
    fake.touch(mode=0o755)
    shown = submit(
        *("--dry-run", "--nodes", "2", "--name", "here", "--time", "02:00", "train.steps=5"),
        cwd=tmp_path,
        env={"PATH": f"{fake.parent}:{os.environ['PATH']}"},
    )
    assert shown.returncode == 0, shown.stderr
    assert "--time 02:00 is 2 minutes and 0 seconds" in shown.stderr
    for part in (
        "#SBATCH --nodes=2\n",
        f"#SBATCH --output={tmp_path}/runs/here/job/slurm-%j.out\n",
        f"-- -m train train.steps=5 data.root={tmp_path}/datasets\n",
        f"# run directory: {tmp_path}/runs/here\n",
        f"MB, from {ROOT} (",
    ):
        assert part in shown.stdout
    assert sorted(tmp_path.rglob("*")) == [fake.parent, fake]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optim.lrr=1"], "unknown key 'optim.lrr', did you mean 'optim.lr'?"),
        (["--nodes", "0"], "--nodes: a whole number from 1 on is expected, not '0'"),
        (["--time", "2h"], "'2h' is no time that Slurm reads"),
        (["--name", "../x"], "run.name"),
        (["--partiton", "x"], "neither submit.py nor sbatch has it, did you mean --partition?"),
        (["--ntasks=2"], "--ntasks: there is one task per node"),
        (["--xyzzy"], "neither submit.py nor sbatch has it (--help lists what there is)"),
        (["-n", "4"], "--ntasks: there is one task per node"),
        (["--gres"], "--gres: a value is expected behind it"),
        (["--local", "--chain", "2"], "--chain: Slurm queues jobs"),
        (["--root", "/scrach/runs"], "there is no /scrach, only /: correct --root"),
        (["--", "gone.py"], "gone.py: there is no such file"),
        (["--", "-m", "gone.module"], "-m gone.module: there is no module gone in"),
        (["--", "/bin/sh"], "/bin/sh lies outside of"),
        (["digits", "--", "/bin/sh"], "'digits' and a program behind `--`"),
        (["--gpus-per-node", "99", "--local"], "--gpus-per-node 99: 1 nodes would need 99 GPUs"),
    ],
)
def test_refusals_write_nothing(tmp_path: Path, words: list[str], message: str) -> None:
    refused = submit(*words, cwd=tmp_path)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["launch/submit.py"], ["-m", "train"], ["-m", "launch"]])
def test_a_python_without_the_packages_is_told_of_env_run(words: list[str]) -> None:
    # -S: without site-packages.
    done = subprocess.run([sys.executable, "-S", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "put ./env/run before the command" in done.stderr
    assert "Traceback" not in done.stderr


def test_dry_run_imports_nothing_heavy(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", SUBMIT[1], "--dry-run"]
    traced = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in traced.stderr.splitlines()}
    assert "train.config" in imported
    heavy = {
        "torch",
        "numpy",
        "submitit",
        "psutil",
        "rich",
        "email",
        "importlib.metadata",
        "secrets",
    }
    assert not imported & heavy


def test_sbatchs_letters_are_understood() -> None:
    words = ["-N2", "-p", "gpu", "-t", "1:00:00", "-A", "team", "-Ja100", "-H", "-C", "a|b"]
    own, passed, program = options.read([*words, "--", "fit.py", "-N9"])
    assert (own.nodes, own.partition, own.time, own.name) == ((2, 2), "gpu", "1:00:00", "a100")
    assert passed == {"account": "team", "hold": None, "constraint": "a|b"}
    assert program == ("fit.py", "-N9")


def test_a_run_that_goes_on_may_take_new_code(tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text("first")
    run = RunDir(tmp_path / "runs", "a")
    for text in ("first", "second", "third"):
        (tmp_path / "fit.py").write_text(text)
        run.job.mkdir(parents=True, exist_ok=True)
        plan = snapshot.plan(tmp_path, run.path.parent)
        snapshot.take(plan, run.code, run.job / "source", run.path.parent / ".code")
    codes = [run.code, run.path / "code-0", run.path / "code-1"]
    assert [(code / "fit.py").read_text() for code in codes] == ["third", "first", "second"]
    assert sorted(path.name for path in run.job.iterdir()) == [
        *("source-0.json", "source-1.json", "source.json")
    ]
    words = ["--local", "--dry-run", "--name", "a"]
    kept, renewed = (
        submit(*words, *more, "--", "fit.py", cwd=tmp_path).stdout for more in ([], ["--new-code"])
    )
    assert "# code: the run has its code already" in kept
    assert "# code: 1 files, 0.0 MB, from" in renewed


def test_a_script_of_ones_own_is_copied_from_its_checkout(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "fit.py").touch()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    words = ["--dry-run", "--qos", "high", "--exclusive", "--name", "a", "--", "fit.py", "--gres"]
    shown = submit(*words, cwd=tmp_path / "tools").stdout
    runs = tmp_path / "tools" / "runs"
    assert f"-- -m launch.guest {runs}/a/code/tools fit.py --gres\n" in shown
    assert f"# code: 1 files, 0.0 MB, from {tmp_path} (" in shown
    (tmp_path / ".gitignore").write_text("fit.py")
    refused = submit("--dry-run", "--", "fit.py", cwd=tmp_path / "tools")
    assert "fit.py: git ignores it, so no copy would have it" in refused.stderr


def test_our_other_commands_are_no_training(tmp_path: Path) -> None:
    words = ["--dry-run", "--root", str(tmp_path), "--name", "a", "--", "-m", "train"]
    predicts = submit(*words, "predict", "trained", cwd=ROOT).stdout
    assert f"-- -m launch.guest {tmp_path}/a/code -m train predict trained\n" in predicts
    assert "-- -m train digits" in submit(*words, "digits", cwd=ROOT).stdout


@pytest.mark.parametrize(
    ("state", "code", "message"),
    [
        ("done", 0, "run a is finished (it was so): nothing is submitted; --resume continues it"),
        ("failed", 2, "run a has failed (it was so): add --resume to continue it"),
    ],
)
def test_a_run_that_has_ended_is_told_and_not_submitted(
    tmp_path: Path, state: State, code: int, message: str
) -> None:
    run = RunDir(tmp_path / "runs", "a")
    run.create()
    run.conclude(Verdict(state, 1, "it was so"))
    before = sorted(tmp_path.rglob("*"))
    answer = submit("--local", "--name", "a", cwd=tmp_path)
    assert (answer.returncode, message in answer.stderr) == (code, True), answer.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_two_submissions_at_once_do_not_make_one_run(tmp_path: Path) -> None:
    argv = ["--root", str(tmp_path), "--name", "a", "digits"]
    line, setup = submission.read(argv)
    one, other = (submission.plan(line, argv, setup) for _ in range(2))
    with start._prepared(one):
        with pytest.raises(submission.TakenError), start._prepared(other):
            pass
        assert (one.run.job / "job.json").exists()


def test_places_in_memory_or_below_tmp_are_node_local(tmp_path: Path) -> None:
    assert place.is_node_local(Path("/dev/shm/runs"))
    assert place.is_node_local(Path("/tmp/runs"))
    assert not place.is_node_local(Path("/usr"))
    assert place.problem(tmp_path / "runs") is None
    assert place.problem(tmp_path / "50%") is None
    assert "%a in a path" in str(place.problem(tmp_path / "50%a")), "submitit puts a number there"
    assert place.problem(tmp_path / "a" / "b" / "runs") == (
        f"there is no {tmp_path}/a/b, only {tmp_path}: correct --root, or `mkdir -p {tmp_path}/a/b`"
    )


def test_snapshot_has_what_is_not_ignored_and_says_what_changed(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    root.mkdir()
    git = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e"]
    for name, text in {"kept": "1", "edited": "1", "gone": "1", ".gitignore": "*.log\n"}.items():
        (root / name).write_text(text)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    (root / "edited").write_text("2")
    (root / "gone").unlink()
    (root / "a.log").touch()
    (root / "new é '\n").write_text("new")
    (root / "runs" / "old").mkdir(parents=True)
    (root / "runs" / "old" / "config.yaml").touch()

    plan = snapshot.plan(root, leave_out=root / "runs")
    run = RunDir(tmp_path, "run")
    run.create()
    run.job.mkdir()
    snapshot.take(plan, run.code, run.job / "source", tmp_path / ".code")

    copied = {str(path.relative_to(run.code)) for path in run.code.rglob("*")}
    assert copied == {"kept", "edited", ".gitignore", "new é '\n"}
    assert (run.code / "edited").read_text() == "2"
    source = json.loads((run.job / "source.json").read_text())
    assert source["modified"] and len(source["commit"]) == 40
    assert "-1\n" in (run.job / "source.diff").read_text()


def shared_by(folder: Path) -> dict[str, int]:
    """How many names each file below a directory has on disk."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_nlink for path in files}


def test_runs_share_equal_code_and_not_what_they_write(tmp_path: Path) -> None:
    root, kept = tmp_path / "checkout", tmp_path / ".code"
    (root / "tools").mkdir(parents=True)
    (root / "fit.py").write_text("first")
    (root / "tools" / "go.sh").write_text("go")
    (root / "tools" / "go.sh").chmod(0o755)
    (root / "model.pt").write_text("saved here once")

    def submitted(name: str, record: Path | None = None) -> RunDir:
        run = RunDir(tmp_path, name)
        run.job.mkdir(parents=True)
        plan = snapshot.recorded(record.parents[1] / "code", record) if record else None
        plan = plan or snapshot.plan(root, tmp_path)
        snapshot.take(plan, run.code, run.job / "source", kept)
        return run

    one = submitted("one")
    two = submitted("two")
    again = submitted("again", record=one.job / "source")
    for run in (one, two, again):  # the third name is the store's
        assert shared_by(run.code) == {"fit.py": 4, "tools/go.sh": 4, "model.pt": 1}
    assert os.access(two.code / "tools" / "go.sh", os.X_OK)
    assert not (two.code / "fit.py").stat().st_mode & 0o222

    (one.code / "model.pt").write_text("the first run's")  # as torch.save does
    (one.code / "new.txt").write_text("the first run's")
    assert (two.code / "model.pt").read_text() == "saved here once"
    assert not (two.code / "new.txt").exists()
    with pytest.raises(snapshot.SnapshotError, match=r"model.pt is no longer what was submitted"):
        submitted("late", record=one.job / "source")

    (root / "fit.py").write_text("edited")
    edited = submitted("edited")
    assert shared_by(edited.code) == {"fit.py": 2, "tools/go.sh": 5, "model.pt": 1}
    assert ((one.code / "fit.py").read_text(), (edited.code / "fit.py").read_text()) == (
        "first",
        "edited",
    )
    (edited.code / "fit.py").chmod(0o644)  # who insists, or is root, writes into a shared file
    (edited.code / "fit.py").write_text("spoilt")
    assert (submitted("after").code / "fit.py").read_text() == "edited"
    shutil.rmtree(edited.path)
    (root / "fit.py").write_text("edited again")
    submitted("last")
    assert len(list(kept.iterdir())) == 4  # first, edited, edited again, go.sh
    shutil.rmtree(kept)
    assert (two.code / "fit.py").read_text() == "first"
    kept.mkdir()
    kept.chmod(0o777)  # others could put code of theirs there
    assert set(shared_by(submitted("alone").code).values()) == {1}
    assert list(kept.iterdir()) == []


def test_snapshot_outside_git_takes_the_packages(tmp_path: Path) -> None:
    (tmp_path / "train" / "__pycache__").mkdir(parents=True)
    (tmp_path / "train" / "a.py").touch()
    (tmp_path / "train" / "__pycache__" / "a.pyc").touch()
    (tmp_path / "elsewhere").touch()
    plan = snapshot.plan(tmp_path, tmp_path / "runs", snapshot.PACKAGED)
    assert plan.files == ("train/a.py",)
    assert "not a git checkout" in plan.describe()


def test_variables_of_a_surrounding_job_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_CONF", "SBATCH_PARTITION", "SRUN_DEBUG", "PMI_RANK"):
        monkeypatch.setenv(name, "1")
    for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES", "KEPT"):
        monkeypatch.setenv(name, "1")
    executors.forget_surroundings()
    assert os.environ["SLURM_CONF"] == os.environ["KEPT"] == "1"
    left = {"SLURM_JOB_ID", "SBATCH_PARTITION", "SRUN_DEBUG", "PMI_RANK", "RANK", "MASTER_ADDR"}
    assert not (left | {"TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES"}) & set(os.environ)


@pytest.mark.parametrize("name", ["plain", "2024", "no", "null", "0x1f", "a.b-c_d"])
def test_words_are_read_back_as_text(name: str) -> None:
    assert parse([word("run.name", name)])[1].run.name == name
    root = f"/a b/{name}: #'\""
    assert parse([word("run.root", root)])[1].run.root == root
