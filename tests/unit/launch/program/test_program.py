"""A submission's checks of a program's data, its Python and its container."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from rollcall.cli import program
from rollcall.cli.installation import ROOT
from rollcall.launch.program import python
from rollcall.launch.program.python import ProgramError
from rollcall.launch.submission import layers, snapshot, start
from rollcall.launch.submission.plan import SubmissionPlan, plan
from rollcall.messages.refusal import RefusedError
from rollcall.records.job import JobRecord
from rollcall.records.run_dir import RunDir
from rollcall.tools.accept import command as accept


def planned(*words: str) -> SubmissionPlan:
    line, setup = layers.read(words)
    return plan(line, words, setup)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose data git ignores, as nanoGPT's."""
    place = tmp_path / "project"
    files = {
        "fit.py": "import os, tqdm9\npath = os.path.join('data', 'train.bin')\n",
        ".gitignore": "*.bin\n/cache/\n",
        "data/small/train.bin": "1",
        "cache/images/1": "1",
        "config/a.yaml": "1",
    }
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    (tmp_path / "elsewhere").mkdir()
    subprocess.run(["git", "init", "-q", str(place)], check=True)
    monkeypatch.chdir(place)
    return place


def notes(shown: pytest.CaptureFixture[str]) -> list[str]:
    return [line.removeprefix("rollcall: note: ") for line in shown.readouterr().err.splitlines()]


def test_files_that_the_job_will_not_have_are_named(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config=config/a.yaml", "--images", "cache/images", "../elsewhere", "new/output"]
    planned("--local", "--", "fit.py", *words, str(project))
    lacks, *told = notes(capsys)
    assert lacks.startswith("fit.py:1 imports tqdm9, which ")
    ignored = "git ignores data"  # which the script names
    assert [note.partition(",")[0] for note in told] == ["cache/images", "../elsewhere", ignored]
    assert "--link cache/images" in told[0] and "Use its absolute path" in told[1]


@pytest.mark.parametrize("own", ["/runs/", "# runs/ ignores itself"])
def test_data_that_git_ignores_is_named_once(
    own: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The paths of data are seldom spelled in arguments: nanoGPT's --dataset is a part of one."""
    (project / "fit.py").write_text("open(os.path.join('data', sys.argv[1], 'train.bin'))")
    large = {"/large/": "large/1/a", "/.venv/": ".venv/x", "/env/": "env/lib/x", "*.pt": "old.pt"}
    (project / ".gitignore").write_text("\n".join(["*.bin", "/cache/", own, *large]))
    for name in (*large.values(), "runs/a/x"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_bytes(bytes(2_000_000))
    (project / "env" / "pyvenv.cfg").touch()
    (project / "runs" / ".gitignore").write_text("*\n")
    planned("--local", "--", "fit.py", "small")
    (told,) = notes(capsys)
    assert told.startswith("git ignores data, large, so the copy will not have it; link what")
    planned("--local", "--link=data/small", "--", "fit.py", "small", "large/1")
    (told,) = notes(capsys)
    assert told.startswith("large/1, named by an argument, will not exist in the job")


RESULTS = (
    *("best.pt", "tb/events.out.tfevents.17.vm.1.0", "checkpoints/step-00000060/manifest.json"),
    *("out/checkpoint-500/model.safetensors", "wandb/run-1/files/output.log"),
)


@pytest.mark.parametrize("in_git", [True, False])
def test_results_of_earlier_runs_do_not_travel(
    project: Path, capsys: pytest.CaptureFixture[str], in_git: bool
) -> None:
    """Of an own script: a new run would restore step 60 of another one, and train nothing."""
    if not in_git:
        shutil.rmtree(project / ".git")
        (project / ".gitignore").unlink()
    (project / "fit.py").write_text("")
    of_run = ("old/a/config.yaml", "old/a/metrics.jsonl")  # `rollcall train run.root=old`
    inputs = ("start.pt", "model/model.safetensors", "committed.pt")
    for name in (*RESULTS, *of_run, *inputs):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("1")
    (project / "old" / ".gitignore").write_text("*\n")
    if in_git:
        subprocess.run(["git", "add", "committed.pt"], check=True)
    found = planned("--local", "--", "fit.py", "--init=start.pt", "--out", "checkpoints").code
    assert found is not None and found.results == tuple(
        sorted([*RESULTS, *([] if in_git else ["committed.pt"])])
    )
    assert not {*RESULTS, *of_run}.intersection(found.files)
    assert {"fit.py", "start.pt", "model/model.safetensors"} <= {*found.files}
    assert ("committed.pt" in found.files) == in_git
    (told,) = notes(capsys)
    assert told.startswith("results of earlier runs stay behind: best.pt, ")
    assert "checkpoints/" in told and "add --link PATH" in told
    linked = planned("--local", "--link=best.pt", "--", "fit.py").code
    assert linked is not None and "best.pt" in linked.links


def test_linked_data_is_not_copied_and_is_there(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (project / "huge.npy").open("wb") as file:
        file.truncate(600_000_000)
    with pytest.raises(RefusedError, match=r"largest is huge.npy, 600 MB.*\(--link huge.npy\)"):
        planned("--local", "--", "fit.py")
    (project / "far").symlink_to("../elsewhere")
    (project.parent / "elsewhere" / "x.csv").touch()
    monkeypatch.chdir(project / "data")
    (project / "data" / "fit.py").touch()
    with pytest.raises(RefusedError, match=r"\(--link \.\./huge.npy\)"):
        planned("--local", "--", "fit.py")
    monkeypatch.chdir(project)
    links = ["--link=huge.npy", "--link=data", "--link", "cache"]
    links += ["--link=data/", "--link=cache/images", "--link=far/x.csv"]
    found = planned("--local", *links, "--", "fit.py", "cache/images", "data")
    assert found.code is not None and found.code.size < 1000
    assert set(found.code.links) == {"huge.npy", "data", "cache", "far"}
    assert len(found.code.files) == len(set(found.code.files)) == 7
    assert [note[:6] for note in notes(capsys)] == ["fit.py"]  # for tqdm9
    for wrong in ("../elsewhere", "gone", "."):
        with pytest.raises(ProgramError, match=f"--link {wrong}: "):
            planned("--local", f"--link={wrong}", "--", "fit.py")
    words = ["--local", "--name=a", "--link=huge.npy", "--", "fit.py"]
    with start._prepared(planned(*words)):
        assert planned(*words).code is None  # submitted again: it keeps its code and links
        with pytest.raises(RefusedError, match=r"--link data: run a keeps .* add --new-code"):
            planned("--link=data", *words)


def test_data_in_a_module_elsewhere_is_refused_unless_git_has_it(project: Path) -> None:
    far = project.parent / "elsewhere"
    (far / "pk").mkdir()
    with (far / "pk" / "weights").open("wb") as file:
        file.truncate(600_000_000)
    cure = f"MB. To leave data out, list it in {far}/.gitignore"
    with pytest.raises(RefusedError, match=f"{cure} after `git init {far}`$"):
        snapshot.plan_modules(far, ["pk"])
    subprocess.run(["git", "init", "-q", str(far)], check=True)
    with pytest.raises(RefusedError, match=f"{cure}$"):
        snapshot.plan_modules(far, ["pk"])
    subprocess.run(["git", "-C", str(far), "add", "--intent-to-add", "pk/weights"], check=True)
    assert snapshot.plan_modules(far, ["pk"]).files == ("pk/weights",)


@pytest.mark.parametrize("kind", ["clone", "conflict", "ignored", "link", "submodule"])
def test_a_copy_has_all_that_is_imported(
    project: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Of a package in the checkout, `mine`, and of one elsewhere, `theirs`."""
    far = project.parent / "elsewhere"
    monkeypatch.setenv("PYTHONPATH", f"{project / 'lib'}:{far / 'lib'}")
    (project / "fit.py").write_text("import mine.part, theirs.part")
    subprocess.run(["git", "init", "-q", str(far)], check=True)
    for package in (project / "lib" / "mine", far / "lib" / "theirs"):
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        folder = package / "part" if kind != "link" else project.parent / "beyond"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
        git = ["git", "-C", str(package), "-c", "user.name=n", "-c", "user.email=e"]
        if kind == "ignored":
            (package.parents[1] / ".gitignore").write_text("part\nvenv\n")
            (package / "venv" / "site-packages").mkdir(parents=True)
            (package / "venv" / "site-packages" / "other.py").touch()
        elif kind in ("clone", "submodule"):
            (folder / ".gitignore").write_text("__init__.py\n")
            for words in (["init"], ["add", "."], ["commit", "-m", "first"]):
                command = [*git[:2], str(folder), *git[3:], *words]
                subprocess.run(command, check=True, capture_output=True)
            if kind == "submodule":
                subprocess.run([*git, "add", "."], check=True, capture_output=True)
        elif kind == "link":
            (package / "part").symlink_to("../../../beyond")
        elif kind == "conflict":
            subprocess.run([*git, "add", "."], check=True)
            listed = [*git, "ls-files", "-s", "--full-name", "part"]
            entry = subprocess.run(listed, capture_output=True, check=True).stdout
            stages = [entry.replace(b" 0\t", b" %d\t" % stage) for stage in (1, 2, 3)]
            stages.insert(0, b"0 %s\t" % (b"0" * 40) + entry.partition(b"\t")[2])
            words = [*git, "update-index", "--index-info"]
            subprocess.run(words, input=b"".join(stages), check=True)
    found = planned("--local", "--", "fit.py")
    assert found.code is not None
    for number, taken in enumerate((found.code, *found.modules)):
        assert not [name for name in taken.files if name.endswith("other.py")]
        target = project.parent / f"copy{number}"
        snapshot.take(taken, target, target, project.parent / "kept")
    assert (project.parent / "copy0" / "lib" / "mine" / "part" / "__init__.py").is_file()
    assert (project.parent / "copy1" / "theirs" / "part" / "__init__.py").is_file()


def test_other_runs_are_not_code(project: Path) -> None:
    for root in ("runs", "old"):
        RunDir(project / root, "a").create()
        (project / root / "a" / "job").mkdir()
        JobRecord(str(project), 1).write(project / root / "a")
    (project / "old" / ".gitignore").unlink()  # of a rollcall that wrote none
    code = planned("--local", "--root=new", "--", "fit.py").code
    assert code is not None and set(code.files) == {"fit.py", ".gitignore", "config/a.yaml"}


@pytest.mark.parametrize(("name", "cure"), [("", "add it with env/run"), ("x", "install it there")])
def test_a_missing_module_is_installed_where_the_job_runs(
    monkeypatch: pytest.MonkeyPatch, name: str, cure: str
) -> None:
    monkeypatch.setattr(python, "ENV_RUN", True)
    missing = python.Facts(sys.executable + name, "3.11.1", "", None, {}, [], "", {"a": "fit.py:1"})
    assert cure in next(missing.lacks())


def test_a_syntax_error_is_found_before_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import model\ndef late(): import unused\n")
    (tmp_path / "model.py").write_text("x = 1\n")
    (tmp_path / "unused.py").write_text("def f(:\n")
    words = ["submit", "--local", "--dry-run", "--", "train.py"]
    assert program.main(words) == 0
    (tmp_path / "model.py").write_text("x = 1\ndef f(:\n")
    assert program.main(words) == 2
    assert f"{tmp_path}/model.py:2: SyntaxError: invalid syntax" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_programs_of_any_name_are_read_and_archives_are_not(tmp_path: Path) -> None:
    (tmp_path / "lib.py").write_text("import absent\n")
    files = {"fit": b"#!/usr/bin/env python\nimport lib\n", "app.pyz": b"", "notes": b"see you\n"}
    for name, text in files.items():
        (tmp_path / name).write_bytes(text)
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", "print(1)\n")
    fit, app, notes = (python.ask(sys.executable, tmp_path, [f"{tmp_path}/{it}"]) for it in files)
    assert (set(fit.missing), fit.broken, app.broken) == ({"absent"}, "", "")
    assert notes.broken == f"{tmp_path}/notes:1: SyntaxError: invalid syntax"


def test_a_python_that_is_too_old_or_none_is_refused(tmp_path: Path) -> None:
    report = python.ask(sys.executable, tmp_path, [])
    old = tmp_path / "bin" / "python"
    old.parent.mkdir()
    text = json.dumps(vars(report) | {"python": "3.9.18"})
    old.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    old.chmod(0o755)
    with pytest.raises(ProgramError, match=r"is Python 3.9.18, and rollcall needs 3.11 or newer"):
        python.ask(python.find(str(tmp_path)), tmp_path, [])
    old.write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    with pytest.raises(ProgramError, match="cannot be used: broken"):
        python.ask(str(old), tmp_path, [])


def test_a_python_on_path_is_not_the_one_that_env_run_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python3").touch(mode=0o755)
    own = [str(ROOT / "env" / "bin"), str(Path(sys.executable).parent)]
    monkeypatch.setenv("PATH", os.pathsep.join([*own, str(tmp_path)]))
    monkeypatch.setattr(python, "ENV_RUN", True)
    assert python.find("python3") == str(tmp_path / "python3")
    monkeypatch.setattr(python, "ENV_RUN", False)  # rollcall was installed in an active environment
    assert python.find("python3") == str(Path(sys.executable).with_name("python3"))


def test_the_packages_of_the_users_home_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(Path(sys.base_prefix) / "bin" / "python3")
    for name, value in {"HOME": str(tmp_path), "PYTHONNOUSERSITE": "1"}.items():
        monkeypatch.setenv(name, value)  # the second one as env/run does
    installed = sysconfig.get_path("purelib", "posix_user", {"userbase": f"{tmp_path}/.local"})
    Path(installed).mkdir(parents=True)
    (Path(installed) / "mylib.py").touch()
    (tmp_path / "fit.py").write_text("import mylib, absent")
    facts = python.ask(base, tmp_path, [str(tmp_path / "fit.py")])
    assert list(facts.missing) == ["absent"]


def test_what_only_a_function_imports_does_not_count_one_step_on_either(tmp_path: Path) -> None:
    files = {
        "fit.py": "def later():\n    import lib.slow\nimport lib.sure\n",
        "lib/__init__.py": "",
        "lib/slow.py": "import absent\nimport lib.both\n",
        "lib/both.py": "import lacks\n",
        "lib/sure.py": "import lib.both\n",
    }
    (tmp_path / "lib").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for fit in (files["fit.py"], files["fit.py"].replace("def later():\n    ", "")):
        (tmp_path / "fit.py").write_text(fit)
        missing = python.ask(sys.executable, tmp_path, [str(tmp_path / "fit.py")]).missing
        assert set(missing) == ({"lacks"} if "later" in fit else {"lacks", "absent"})


def test_a_dry_run_tells_the_python_and_what_it_lacks(project: Path) -> None:
    submit = ROOT / "launch" / "submit.py"
    (project / "fit.py").write_text("import torch, yaml\nimport tqdm9\n")
    done = subprocess.run(
        [sys.executable, submit, "--dry-run", "--local", "--", "fit.py"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"# python: {sys.executable}, version 3." in done.stdout
    assert f"# fit.py:2 imports tqdm9, which {sys.executable} does not have" in done.stdout


def container_command(project: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> list[str]:
    """Return the srun command of a job in a container, as planned with these programs on PATH."""
    on_path(project, monkeypatch, **programs)
    words = ["--name=a", "--nodes=2", "--gpus-per-node=1", "--cpus-per-task=8", "--mount=/data"]
    words += ["--link=cache", "--container", "image.sif", "--", "fit.py"]
    job = planned(*words).job
    return [*job.srun, *job.command]


def on_path(project: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    """Put programs on PATH, and an image into the project."""
    folder = project.parent / "bin"
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    (project / "image.sif").touch()


SUPERVISE = ["python3", "-m", "rollcall", "supervise", "--run-dir"]


def test_a_container_runs_with_pyxis(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    help_text = "echo '      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH'"
    found = container_command(project, monkeypatch, srun=help_text, sbatch="", apptainer="")
    run = project / "runs"
    mounts = [f"{place}:{place}" for place in (run, project / "cache", "/data")]
    assert found[:3] == [
        f"--container-image={project}/image.sif",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={run}/a/job/rollcall",
    ]
    assert found[3:9] == [*SUPERVISE, f"{run}/a"]


def test_a_container_runs_with_apptainer(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = container_command(project, monkeypatch, srun="", sbatch="", apptainer="")
    run = project / "runs"
    assert found[:6] == [
        *("apptainer", "exec", "--nv", f"--bind={run},{project}/cache,/data"),
        *(f"--pwd={run}/a/job/rollcall", f"{project}/image.sif"),
    ]
    assert found[6:12] == [*SUPERVISE, f"{run}/a"]


@pytest.mark.usefixtures("project")
def test_without_a_container_program_the_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(ProgramError, match=r"the pyxis plugin\), and neither apptainer nor sing"):
        planned("--local", "--container", "x.sif", "--", "fit.py")


@pytest.mark.usefixtures("project")
def test_a_dry_run_needs_no_container_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    job = planned("--local", "--dry-run", "--container", "x.sif", "--", "fit.py").job
    assert job.command[:2] == ("apptainer", "exec") and "python3" in job.command
    assert "a submission from here would be refused" in capsys.readouterr().err


def test_accept_reads_the_options_of_submit_from_this_directory(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However they are spelled, and with relative paths, though the job works in the checkout."""
    on_path(project, monkeypatch, apptainer="")
    paths = ["--container=image.sif", "--mount", "data:/data"]
    options = ["--local", "--dry-run", "--root", "mine", "--job-name=it", *paths]
    assert accept.main([*options, "--", "--only=machine"]) == 0
    shown = capsys.readouterr().out
    run = project / "mine" / "it"
    assert f"{run}/accept 'rollcall accept --local" in shown and f"run directory: {run}" in shown
    assert f"{project}/image.sif" in shown and f",{project}/data:/data" in shown
    monkeypatch.chdir(project)
    (project / "mine" / "it").mkdir(parents=True)
    assert accept.main(options) == 2
    assert f"{run} exists; choose another --name" in capsys.readouterr().err
    (run / "accept.md").touch()
    assert accept.main(options) == 2
    assert f"{run} exists, with its page in {run}/accept.md; choose" in capsys.readouterr().err
    with pytest.raises(RefusedError, match="--nods: not an option"):
        accept.main(["--nods=2"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "--only=disk"], "'disk' is none of machine,"),
        (["--", "optim.lrr=1"], "optim.lr'?"),
        (
            ["--only", "memory"],
            r"^--only: write it after `--`, as in rollcall accept .*submit] -- \[--only\]",
        ),
        (["optim.lr=1"], r"^optim.lr=1: expected .*submit] -- .*\[key=value\]$"),
    ],
)
def test_accept_refuses_a_mistake_before_it_starts_anything(
    tmp_path: Path, words: list[str], message: str
) -> None:
    with pytest.raises(RefusedError, match=message):
        accept.main(["--local", "--root", str(tmp_path), *words])
    assert not [*tmp_path.iterdir()]
