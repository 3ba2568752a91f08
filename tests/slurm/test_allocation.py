"""On a cluster: jobs in a separate environment of the user, by sbatch and in a salloc shell."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from checkout import ROOT
from lab import Lab, wait_until

from rollcall.records.job import Submission
from rollcall.records.run_dir import RunDir

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]
SCRIPT = """
import os, pathlib, sys, time, helper
print(os.environ["RANK"], os.environ["WORLD_SIZE"], sys.prefix, helper.__file__, flush=True)
time.sleep(float(sys.argv[2]) if sys.argv[2:] else 0)
sys.exit(int(sys.argv[1]))
"""


def test_a_job_and_an_allocation_use_the_environment(lab: Lab, tmp_path: Path) -> None:
    python, project, elsewhere = (tmp_path / name for name in ("venv", "project", "elsewhere"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(python)], check=True)
    for folder in (project, elsewhere):
        folder.mkdir()
    (project / "fit.py").write_text(SCRIPT)
    (elsewhere / "helper.py").touch()
    env = {"PYTHONPATH": str(elsewhere)}

    def words(name: str, code: int, *options: str) -> list[str]:
        place = [f"--name={name}", f"--python={python}", "--nproc-per-node=1", *options]
        return [*SUBMIT, *place, "--", "fit.py", str(code)]

    def check(name: str, count: int) -> RunDir:
        run = RunDir(project / "runs", name)
        for rank in range(count):
            said = run.log(0, rank, rank).read_text().split()
            helper = run.job / "modules" / "0" / "helper.py"
            assert said == [str(rank), str(count), str(python), str(helper)]
        return run

    lines = ["--nodes=2", f"--teardown=echo $ROLLCALL_EXIT_CODE >{tmp_path}/after", "--wait"]
    done = lab.exec("login", *words("job", 0, *lines), env=env, cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    check("job", 2)
    assert (tmp_path / "after").read_text() == "0\n"

    here = shlex.join(words("held", 3, "--in-allocation"))
    again = shlex.join(words("held", 0, "--in-allocation", "--resume"))
    shell = f"{here}; echo first $?; {again}; echo second $?"
    ask = f"cd {ROOT}; {sys.executable} -m launch"
    ended = project / "runs" / "ended"
    shell += f"; {shlex.join([*words('ended', 0, '--in-allocation'), '600'])} >/dev/null & "
    shell += f"until test -s {ended}/logs/attempt-0/node-1/rank-1.log; do sleep 0.2; done; "
    shell += f"{ask} cancel {ended}; wait; {ask} status {ended}; squeue -h -j $SLURM_JOB_ID -o %T"
    told = lab.exec(
        "login", "salloc", "--nodes=2", "--cpus-per-task=2", "bash", "-c", shell,
        env=env, cwd=project,
    )  # fmt: skip
    assert "first 3" in told.stdout and "second 0" in told.stdout, told.stdout + told.stderr
    assert "RUNNING" in told.stdout  # the allocation is still the user's
    assert re.search(r"^ended +stopped ", told.stdout, re.MULTILINE), told.stdout + told.stderr
    check("held", 2)


SAVES = """
import pathlib, signal, sys, time
asked = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda *_: asked.append(1))
pathlib.Path(sys.argv[1]).touch()
while not asked:
    time.sleep(0.05)
sys.exit(75)
"""


def test_a_cancelled_run_and_a_part_of_a_chain_have_not_failed(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    began = tmp_path / "began"

    def start(name: str, *options: str) -> subprocess.Popen[bytes]:
        words = [*SUBMIT, "--wait", "--nproc-per-node=1", f"--name={name}", *options]
        command = lab.argv("login", *words, "--", "saves.py", str(began))
        return subprocess.Popen(command, cwd=tmp_path)

    def stop(name: str, number: int, *options: str) -> str:
        wait_until(began.exists, 500, lambda: f"run {name} has not started")
        began.unlink()
        job = Submission.read(tmp_path / "runs" / name)[number].job
        lab.output("login", "scancel", *options, job)
        return job

    with start("ended") as waiting:
        stop("ended", 0)
        assert waiting.wait(500) == 130
    with start("chain", "--chain=2", "--no-requeue") as waiting:
        first = stop("chain", 0, "--batch", "--signal=USR2")
        second = stop("chain", 1, "--batch", "--signal=USR2")
        assert waiting.wait(500) == 75
    assert [lab.job(job, "JobState") for job in (first, second)] == ["COMPLETED", "FAILED"]
