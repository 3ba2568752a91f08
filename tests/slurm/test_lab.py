"""The lab is what the other tests take it for: several hosts, real Slurm, nothing left behind."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from lab import COMMANDS, Lab, run_command, running_lab, wait_until

HOSTS = ("login", "n1", "n2", "n3", "n4")


def namespaces(name: str) -> set[str]:
    """The network namespaces of a running lab."""
    mark = f" rollcall-lab:{name}:"
    marked = [p for p in Path("/proc").glob("[0-9]*") if mark in read(p / "mountinfo")]
    return {namespace for pid in marked if (namespace := network(pid))}


def network(pid: Path) -> str:
    try:
        return str((pid / "ns" / "net").readlink())
    except OSError:  # the process has ended meanwhile
        return ""


def traces(name: str, networks: set[str]) -> set[str]:
    """The parts of a lab: processes, by mark or by network, control groups and files."""
    networks = networks | namespaces(name)
    inside = [p for p in Path("/proc").glob("[0-9]*") if network(p) in networks]
    groups = Path("/sys/fs/cgroup").glob(f"*/rollcall-lab-{name}")
    files = Path("/var/lib/rollcall-lab").glob(name)
    return {str(path) for path in (*inside, *groups, *files)}


def surroundings(own: Path) -> set[str]:
    """Network links and mounts outside all labs. A lab changes none, not even while it is up.

    Tests that run at the same time mount file systems in temporary directories other than `own`.
    """

    def is_of_others(mount: str) -> bool:
        place = Path(mount.split()[4])
        of_tests = any(part.startswith("pytest-of-") for part in place.parts)
        return of_tests and own not in (place, *place.parents)

    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
    mounts = read(Path("/proc/self/mountinfo")).splitlines()
    found = {mount for mount in mounts if not is_of_others(mount)}
    return {line.split(":")[1] for line in links.stdout.splitlines()} | found


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process has ended meanwhile
        return ""


def test_every_host_has_its_own_name_address_and_tmp(lab: Lab, tmp_path: Path) -> None:
    for host in HOSTS:
        lab.output(host, "sh", "-c", "hostname > /tmp/rollcall-name")
        lab.output(host, "sh", "-c", f"hostname -I > {tmp_path}/address-$(hostname)")
    names = [lab.output(host, "cat", "/tmp/rollcall-name") for host in HOSTS]
    addresses = [path.read_text().strip() for path in sorted(tmp_path.iterdir())]
    assert names == ["ctl", "n1", "n2", "n3", "n4"]
    assert len(set(addresses)) == 5, "one file system for all, one address for each"
    # Debian's installer makes a host's own name mean loopback, and only on that host.
    assert lab.output("n1", "getent", "hosts", "n1").split()[0] == "127.0.1.1"
    assert lab.output("n2", "getent", "hosts", "n1").split()[0] == addresses[1]


def test_exec_passes_input_exit_code_directory_and_environment(lab: Lab, tmp_path: Path) -> None:
    result = subprocess.run(
        lab.argv("n2", "sh", "-c", "cat; pwd; echo $WORD; exit 7"),
        input="from outside\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"WORD": "kept"},
        timeout=500,
        check=False,
    )
    assert result.stdout.splitlines() == ["from outside", str(tmp_path), "kept"]
    assert result.returncode == 7
    with subprocess.Popen(lab.argv("n2", "sleep", "60")) as sleeper:
        wait_until(
            lambda: "sleep" in read(Path(f"/proc/{sleeper.pid}/comm")), 60, lambda: "no sleep"
        )
        sleeper.terminate()
        assert sleeper.wait(500) == -signal.SIGTERM, "exec becomes the command: signals reach it"


def test_a_step_over_two_hosts_gets_fake_gpus_and_is_accounted_for(lab: Lab) -> None:
    script = (
        "echo $(hostname) $SLURM_NODEID $CUDA_VISIBLE_DEVICES $SLURM_GPUS_ON_NODE $SLURM_JOB_ID"
    )
    lines = lab.output("login", "srun", "-N2", "--gpus-per-node=2", "sh", "-c", script).splitlines()
    tasks = sorted(line.split() for line in lines)
    assert [task[1:4] for task in tasks] == [["0", "0,1", "2"], ["1", "0,1", "2"]]
    assert tasks[0][0] != tasks[1][0]
    job_id = tasks[0][4]
    sacct = ("sacct", "--noheader", "--parsable2", "--allocations", "--format=State,User")

    def accounted() -> str:
        return lab.output("login", *sacct, f"--jobs={job_id}")

    wait_until(lambda: accounted() == "COMPLETED|root", 500, accounted)


def test_the_urgent_partition_requeues_a_job_of_the_main_one(lab: Lab, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text('#!/bin/sh\n[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || exec sleep 600\n')
    whole = ("--nodes=4", "--exclusive", f"--output={tmp_path}/%j.log")
    job_id = lab.output("login", "sbatch", "--parsable", *whole, str(script))

    def state() -> str:
        return lab.job(job_id, "JobState")

    wait_until(lambda: state() == "RUNNING", 500, state)
    lab.output("login", "srun", "--partition=urgent", "--nodes=4", "--exclusive", "true")
    assert lab.job(job_id, "Restarts") == "1"
    assert lab.wait_job(job_id) == "COMPLETED"


def proctrack(lab: Lab) -> str:
    config = lab.output("login", "scontrol", "show", "config")
    return next(line for line in config.splitlines() if "ProctrackType" in line).split("/")[1]


@pytest.mark.parametrize("kind", ["cgroup", "linuxproc"])
def test_a_lab_beside_another_leaves_no_trace(
    lab: Lab, lab_options: list[str], tmp_path: Path, kind: str
) -> None:
    own = tmp_path.parent
    before = surroundings(own)
    options = ("--nodes", "2", "--gpus", "0", "--proctrack", kind)
    with running_lab(f"{lab.name}-b", *options, *lab_options) as second:
        assert surroundings(own) == before
        assert proctrack(second) == kind
        assert sorted(second.output("n1", "srun", "-N2", "hostname").split()) == ["n1", "n2"]
        # What a careless `down` would leave: an orphan of a job, and, frozen, a suspended job.
        second.output("login", "srun", "sh", "-c", "setsid sleep 601 >/dev/null 2>&1 & true")
        pid_file = tmp_path / "pid"
        script = f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; exec sleep 602"
        sbatch = ("sbatch", "--parsable", "--output=/dev/null", f"--wrap={script}")
        job_id = second.output("login", *sbatch)
        wait_until(pid_file.exists, 500, lambda: "the job does not run")
        second.output("login", "scontrol", "suspend", job_id)
        stat = Path("/proc", pid_file.read_text().strip(), "stat")
        suspended = ") D " if kind == "cgroup" else ") T "
        wait_until(lambda: suspended in read(stat), 500, lambda: read(stat))
        networks = namespaces(second.name)
        assert len(networks) == 3
        assert len(lab.output("login", "sinfo", "--noheader", "--Node", "-pmain").split("\n")) == 4
    assert traces(second.name, networks) == set()


def test_a_failing_up_shows_the_log_and_cleans_up(
    lab: Lab, lab_options: list[str], tmp_path: Path
) -> None:
    name = f"{lab.name}-c"
    broken = tmp_path / "slurmctld"
    broken.write_text("#!/bin/sh\necho 'fatal: broken on purpose' >&2\nexit 1\n")
    broken.chmod(0o755)
    up = subprocess.run(
        [str(COMMANDS / "up"), "--name", name, *lab_options],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert up.returncode == 1
    assert "slurmctld-ctl ended" in up.stderr
    assert "fatal: broken on purpose" in up.stderr
    assert traces(name, set()) == set()


def test_down_clears_away_what_a_killed_up_leaves(lab: Lab) -> None:
    name = f"{lab.name}-d"
    with subprocess.Popen([str(COMMANDS / "up"), "--name", name], stderr=subprocess.DEVNULL) as up:
        log = Path(f"/var/lib/rollcall-lab/{name}/log/slurmdbd-ctl.log")
        wait_until(log.exists, 500, lambda: f"there is no {log}")
        up.kill()
    networks = namespaces(name)
    again = run_command("up", "--name", name)
    assert again.returncode == 1
    assert "is there already" in again.stderr
    assert run_command("down", "--name", name).returncode == 0
    assert traces(name, networks) == set()
    assert run_command("down", "--name", name).returncode == 1, "there is nothing left to take down"
