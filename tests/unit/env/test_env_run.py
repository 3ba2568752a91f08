"""env/run with installers, drivers and Slurm replaced by small programs that record their use."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkout import ROOT
from wheels import wheel

UV = r"""#!/bin/bash
echo "uv $*" >>"$FAKE/calls"
case $1 in
    venv)
        mkdir -p "$4/bin"
        cp "$FAKE/venv-python" "$4/bin/python" ;;
    pip)
        if [[ -p $FAKE/hold ]]; then read -r <"$FAKE/hold"; fi
        if [[ -n ${UV_SAYS:-} ]]; then echo "$UV_SAYS"; exit 1; fi ;;
esac
"""
VENV_PYTHON = r"""#!/bin/bash
echo "torch 2.11.0 and torchvision 0.26.0"
if [[ -n ${PAIR_SAYS:-} ]]; then echo "$PAIR_SAYS" >&2; exit 1; fi
echo "${CUDA:-13.2}"
"""


class Machine:
    """Fakes: a folder of programs, one of environments, a kernel with a driver."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.envs = folder, folder / "bin", folder / "envs"
        self.running: list[subprocess.Popen[str]] = []
        self.bin.mkdir()
        self.program("uv", UV)
        self.program("venv-python", VENV_PYTHON, folder)
        for absent in ("nvidia-smi", "sinfo"):
            self.program(absent, "#!/bin/sh\nexit 9\n")
        self.environ = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(folder),
            "FAKE": str(folder),
            "ROLLCALL_ENVS": str(self.envs),
            "ROLLCALL_PYTHON": sys.executable,
            "ROLLCALL_SYSROOT": str(folder),
            "https_proxy": "http://127.0.0.1:9",  # nobody listens: no test reaches a network
            "PIP_INDEX_URL": "http://127.0.0.1:9/simple",  # a registry that only installers know
        }
        self.driver("580.65.06")

    def program(self, name: str, text: str, folder: Path | None = None) -> None:
        path = (folder or self.bin) / name
        path.write_text(text)
        path.chmod(0o755)

    def driver(self, version: str) -> None:
        path = self.folder / "sys/module/nvidia/version"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if version:
            path.write_text(version + "\n")

    def start(self, *command: str, root: Path = ROOT, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(root / "env" / "run"), *command],
            env=self.environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.running.append(process)
        return process

    def run(
        self, *command: str, root: Path = ROOT, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        process = self.start(*command, root=root, **environ)
        out, err = process.communicate(timeout=500)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def refused(self, *command: str, **environ: str) -> str:
        done = self.run(*command, root=ROOT, **environ)
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        return done.stderr

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def environments(self) -> list[str]:
        return sorted(path.parent.name for path in self.envs.glob("*/ready"))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    for process in machine.running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 500
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.02)


def test_the_command_runs_in_an_environment_that_is_made_once(machine: Machine) -> None:
    show = (
        'printf "%s|" "$@" "$VIRTUAL_ENV" "$PATH" "$PYTHONNOUSERSITE" "${PYTHONHOME-none}"; exit 7'
    )
    command = ("bash", "-c", show, "-", "two words", "$HOME *", "")
    first = machine.run(*command, PYTHONHOME="/wrong")
    again = machine.run("--quiet", *command, PYTHONHOME="/wrong")
    *arguments, venv, path, no_user_site, home, _ = first.stdout.split("|")
    assert arguments == ["two words", "$HOME *", ""]
    assert Path(venv).parent.parent == machine.envs
    ours, theirs = path.split(":")[:2]
    assert ours.endswith("/env/bin") and theirs == f"{venv}/bin"  # our torchrun before torch's
    assert (no_user_site, home) == ("1", "none")
    assert (first.returncode, again.returncode) == (7, 7)
    assert (again.stdout, again.stderr) == (first.stdout, "")
    venv_call, torch_call, rest_call = machine.calls()
    assert venv_call == f"uv venv --python {sys.executable} {venv}"
    assert "'" not in torch_call and torch_call.endswith(
        "--compile-bytecode torch>=2.11 torchvision"
    )
    assert "submitit" in rest_call and "pytest" in rest_call
    assert remains(machine) == ["install.log", "ready", "venv"]


def test_python_finds_the_package_of_the_checkout_and_nothing_else(
    machine: Machine, tmp_path: Path
) -> None:
    """In any directory, after the user's own modules, also with packages of --with."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "made"], check=True)
    assert machine.run("true").returncode == 0
    [made] = machine.envs.glob("py*/venv-*")
    shutil.rmtree(made)
    (tmp_path / "made").rename(made)
    show = "from importlib.util import find_spec as find; names = 'rollcall train launch env'\n"
    show += "print(*(find(name) and find(name).origin for name in names.split()))"
    ours = f"{ROOT}/rollcall/__init__.py"
    where = tmp_path / "elsewhere"
    where.mkdir()
    for own, theirs in (("None", ours), (f"{where}/train.py", ours)):
        words = ["sh", "-c", f"cd {where} && python -c {shlex.quote(show)}"]
        assert machine.run(*words).stdout == f"{theirs} {own} None None\n"
        (where / "train.py").touch()
    (where / "rollcall.py").touch()
    assert machine.run(*words).stdout.split()[0] == f"{where}/rollcall.py"
    command = [f"{made}/bin/python", "-c", show]
    plain = subprocess.check_output(command, cwd=tmp_path, env=machine.environ, text=True)
    assert plain == "None None None None\n"  # without env/run


def test_a_quiet_build_says_when_it_begins_and_ends(machine: Machine) -> None:
    made = machine.run("--quiet", "true")
    begin, end = made.stderr.splitlines()
    assert (made.returncode, made.stdout) == (0, "")
    assert begin.startswith(f"env/run: making {machine.envs}/") and "env/run: ready after" in end


def test_the_command_takes_the_place_of_env_run(machine: Machine) -> None:
    # Signals then reach the command, which has the dispositions that env/run was started with.
    ask = ("grep", "-E", "^(Pid|SigIgn):", "/proc/self/status")
    ignored = subprocess.check_output(ask, text=True).split()[3]
    for _ in ("making the environment", "finding it ready"):
        process = machine.start(*ask)
        out, _ = process.communicate(timeout=500)
        assert out.split() == ["Pid:", str(process.pid), "SigIgn:", ignored]


@pytest.mark.parametrize(
    ("driver", "cuda", "choice"),
    [
        ("610.10", "13.2", "default"),
        ("580.65.06", "13.2", "default"),
        ("579.99", "12.8", "cu128"),
        ("570.133.20", "12.8", "cu128"),
        ("569.10", "12.6", "cu126"),
        ("525.60.13", "12.6", "cu126"),
    ],
)
def test_the_driver_chooses_the_build(
    machine: Machine, driver: str, cuda: str, choice: str
) -> None:
    machine.driver(driver)
    done = machine.run("printenv", "ROLLCALL_TORCH", CUDA=cuda)
    assert (done.stdout, done.returncode) == (choice + "\n", 0)
    index = re.findall(r"--index-url (\S+)", "\n".join(machine.calls()))
    assert [url.rsplit("/", 1)[1] for url in index] == ([choice] if choice != "default" else [])


def test_a_driver_that_only_other_sources_show(machine: Machine) -> None:
    machine.driver("")
    machine.program("nvidia-smi", "#!/bin/sh\necho 570.86.15\n")
    assert machine.run("printenv", "ROLLCALL_TORCH", CUDA="12.8").stdout == "cu128\n"
    module = machine.folder / "proc/driver/nvidia/version"
    module.parent.mkdir(parents=True)
    module.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.54.03  Release\n"
    )
    assert machine.run("printenv", "ROLLCALL_TORCH", CUDA="12.6").stdout == "cu126\n"


def test_without_a_driver(machine: Machine) -> None:
    machine.driver("")
    done = machine.run("printenv", "ROLLCALL_TORCH")
    assert done.stdout == "default\n"
    assert "does not answer: using the registry's default build" in done.stderr
    # Asked for a CPU build, then chosen by every other node without a driver: it is ready.
    (machine.envs / "chosen").rename(machine.folder / "forgotten")
    assert machine.run("printenv", "ROLLCALL_TORCH", ROLLCALL_TORCH="+cpu").stdout == "cpu\n"
    assert machine.run("printenv", "ROLLCALL_TORCH").stdout == "cpu\n"


def test_a_login_node_chooses_for_the_gpu_nodes(machine: Machine) -> None:
    machine.driver("")
    machine.program("sinfo", '#!/bin/sh\necho "sinfo $*" >>"$FAKE/calls"; echo gpu:4\n')
    first = machine.run("printenv", "ROLLCALL_TORCH")
    assert first.stdout == "default\n"
    assert "this Slurm cluster has GPUs" in first.stderr
    machine.run("true")
    assert machine.calls().count("sinfo -h -o %G") == 1  # the decision is remembered
    (machine.envs / "chosen").rename(machine.folder / "forgotten")
    machine.run("true", SLURM_JOB_ID="1")
    assert machine.calls().count("sinfo -h -o %G") == 1  # a job knows its own node


@pytest.mark.parametrize(
    ("asked", "choice", "torch_arguments"),
    [
        ("2.11.0", "2.11.0+default", "torch>=2.11 torchvision torch==2.11.0"),
        ("cu132", "cu132", "whl/cu132 torch>=2.11 torchvision"),
        ("2.11.0+cu132", "2.11.0+cu132", "whl/cu132 torch>=2.11 torchvision torch==2.11.0"),
        ("+cpu", "cpu", "whl/cpu torch>=2.11 torchvision"),
        ("default", "default", "torch>=2.11 torchvision"),
    ],
)
def test_rollcall_torch_overrides(
    machine: Machine, asked: str, choice: str, torch_arguments: str
) -> None:
    done = machine.run("printenv", "ROLLCALL_TORCH", ROLLCALL_TORCH=asked)
    assert done.stdout == choice + "\n"
    assert machine.calls()[1].endswith(torch_arguments)
    again = machine.run("printenv", "ROLLCALL_TORCH", ROLLCALL_TORCH=choice)  # inside a job
    assert (again.stdout, len(machine.calls())) == (choice + "\n", 3)


def test_only_changed_requirements_make_an_environment_stale(machine: Machine) -> None:
    checkout = machine.folder / "checkout"
    shutil.copytree(ROOT / "env", checkout / "env")
    project = (ROOT / "pyproject.toml").read_text()
    for text, count in (
        (project, 1),
        (project.replace("line-length = 100", "line-length = 90"), 1),
        (project.replace('"psutil>=5.9"', '"psutil>=6"'), 2),
    ):
        (checkout / "pyproject.toml").write_text(text)
        assert machine.run("true", root=checkout).returncode == 0
        assert len(machine.environments()) == count
    assert machine.run("true").returncode == 0  # another checkout shares it
    assert len(machine.environments()) == 2


def test_many_at_once_build_once(machine: Machine) -> None:
    os.mkfifo(machine.folder / "hold")
    builder = machine.start("true")
    eventually(lambda: any("torchvision" in call for call in machine.calls()))
    others = [machine.start("echo", "in") for _ in range(4)]
    for other in others:
        assert other.stderr is not None
        assert "waiting for process" in other.stderr.readline()
    release(machine)
    assert builder.wait(timeout=500) == 0
    assert [other.communicate(timeout=500)[0] for other in others] == ["in\n"] * 4
    assert sum(call.startswith("uv venv") for call in machine.calls()) == 1


def remains(machine: Machine) -> list[str]:
    """The names in the folder of an environment, without random suffixes."""
    return sorted(path.name.split("-")[0] for path in machine.envs.glob("py*/*"))


def release(machine: Machine) -> None:
    # Later steps find no pipe and do not wait; the held one reads end of file.
    hold = machine.folder / "hold"
    released = hold.with_name("released")
    hold.rename(released)
    released.open("w").close()


def test_those_who_wait_learn_why_the_builder_failed(machine: Machine) -> None:
    os.mkfifo(machine.folder / "hold")
    builder = machine.start("true", UV_SAYS="error: No space left on device (os error 28)")
    eventually(lambda: any("torchvision" in call for call in machine.calls()))
    other = machine.start("true")
    assert other.stderr is not None
    assert "waiting for process" in other.stderr.readline()
    release(machine)
    messages = [process.communicate(timeout=500)[1] for process in (builder, other)]
    assert all("the disk or your quota is full" in message for message in messages)
    assert (builder.returncode, other.returncode) == (1, 1)
    assert machine.environments() == []
    assert machine.run("true").returncode == 0  # a new start tries again


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_builder_is_replaced(machine: Machine, number: signal.Signals) -> None:
    os.mkfifo(machine.folder / "hold")
    builder = machine.start("true")
    eventually(lambda: any("torchvision" in call for call in machine.calls()))
    if number == signal.SIGKILL:
        os.killpg(builder.pid, number)  # and its children: what the death of a node leaves behind
    else:
        builder.send_signal(number)
    _, said = builder.communicate(timeout=500)
    assert ("env/run: interrupted; repeat" in said) == (number != signal.SIGKILL)
    killed = ["install.log", "lock.0", "venv", "venv"]
    assert remains(machine) == (killed if number == signal.SIGKILL else ["install.log"])
    (machine.folder / "hold").unlink()
    assert machine.run("echo", "in").stdout == "in\n"
    assert remains(machine) == ["install.log", "ready", "venv"]


def test_a_builder_of_a_dead_node_is_replaced_by_one(tmp_path: Path) -> None:
    (tmp_path / "lock.4").write_text("elsewhere 1 17\n")
    script = (
        "import sys, pathlib, turn; turn.DEAD_S, turn.POLL_S = 1.0, 0.05\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "if lock := turn.take_turn(folder, print):\n"
        "    print('build in', lock.path.name)\n"
        "    (folder / 'ready').write_text('venv')\n"
        "    lock.release()\n"
    )
    start = [sys.executable, "-B", "-c", script, str(tmp_path)]
    processes = [
        subprocess.Popen(start, cwd=ROOT / "env", stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    lines = "".join(process.communicate(timeout=500)[0] for process in processes).splitlines()
    # One that comes late may wait for the one that builds.
    assert "waiting for process 1 on elsewhere, which is making this environment" in lines
    assert [line for line in lines if "waiting" not in line] == ["build in lock.5"]


def test_too_little_space_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    script = "import sys, pathlib, build; build.check_space(pathlib.Path(sys.argv[1]), 1e6)"
    done = subprocess.run(
        [sys.executable, "-B", "-c", script, str(tmp_path)],
        cwd=ROOT / "env",
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(r"not enough disk space: .* GB free, .* set ROLLCALL_ENVS", done.stderr)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"UV_SAYS": "dns error: Temporary failure in name resolution"}, "cannot be reached"),
        ({"UV_SAYS": "OSError: [Errno 28] No space left on device"}, "Free some space"),
        ({"UV_SAYS": "  x No solution found when resolving"}, "Choose another ROLLCALL_TORCH"),
        ({"UV_SAYS": "a riddle"}, "its last lines: a riddle"),
        ({"PAIR_SAYS": "RuntimeError: torchvision::nms"}, "do not work together (RuntimeError"),
        ({"ROLLCALL_TORCH": "cu128"}, "asks for cu128, but the installer found torch 2.11.0"),
        ({"ROLLCALL_TORCH": "newest"}, "expected [VERSION][+BUILD]"),
        ({"ROLLCALL_TORCH": "1.13.1"}, "ROLLCALL_TORCH=1.13.1: rollcall needs torch 2.11 or newer"),
        ({"PIP_INDEX_URL": ""}, "the package registry cannot be reached from this host"),
    ],
)
def test_a_failed_installation_names_cause_and_cure(
    machine: Machine, environ: dict[str, str], message: str
) -> None:
    error = machine.refused("true", **environ)
    assert message in error
    assert machine.environments() == [] and not list(machine.envs.glob("*/venv-*"))
    if environ.get("ROLLCALL_TORCH") in ("newest", "1.13.1") or "PIP_INDEX_URL" in environ:
        assert machine.calls() == []  # refused at once
    if log := re.search(r"Log: (.*)", error):
        assert Path(log[1]).read_text()


def test_a_build_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cu132" / "torch").mkdir(parents=True)
    serve = [sys.executable, "-um", "http.server", "0", "--bind=127.0.0.1", f"-d{tmp_path}"]
    ask = "import choose, sys; choose.INDEX = sys.argv[1]; print(choose.is_reachable(sys.argv[2]))"
    environ = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "ROLLCALL_SYSROOT": "/nowhere"}
    with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        url = re.search(r"http://[^/]+/", server.stdout.readline().decode())
        assert url is not None
        for build, expected in (("cu132", "True"), ("cu999", "asks for the build cu999, and http")):
            command = [sys.executable, "-Bc", ask, url[0], build]
            done = subprocess.run(
                command, cwd=ROOT / "env", env=environ, capture_output=True, text=True
            )
            assert expected in done.stdout + done.stderr
        server.terminate()


def test_a_build_that_torch_never_had_is_refused_at_once() -> None:
    ask = "import choose, sys; print(choose.parse(sys.argv[1]))"
    for request, expected in (
        ("cu99", "torch 2.11 and newer have no build cu99. Choose cpu, default, or one of cu128"),
        ("2.11.0+cu118", "have no build cu118"),
        ("cu126", "('', 'cu126')"),
        ("2.12.0+cu130", "('2.12.0', 'cu130')"),
    ):
        command = [sys.executable, "-Bc", ask, request]
        done = subprocess.run(command, cwd=ROOT / "env", capture_output=True, text=True)
        assert expected in done.stdout + done.stderr


def test_an_installation_that_takes_long_says_how_far_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hold")
    script = (
        "import sys, pathlib, build; build.PROGRESS_S = 0.05\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "builder = build.Builder(folder, sys.executable, 'cpu', build.say)\n"
        "builder.run('sh', '-c', 'head -c 2000000 /dev/zero >wheel; read line <hold')\n"
    )
    command = [sys.executable, "-B", "-c", script, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT / "env", stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "env/run: 2 MB after" not in (line := process.stderr.readline()):
            assert line.startswith("env/run: ")
        (tmp_path / "hold").write_text("\n")
    assert process.returncode == 0


def test_a_driver_that_is_too_old(machine: Machine) -> None:
    machine.driver("470.57.02")
    assert "driver 470.57.02 is too old: torch needs 525 or newer" in machine.refused("true")


def test_a_python_that_does_not_fit(machine: Machine) -> None:
    machine.program("python3.9", "#!/bin/sh\necho 3.9\n")
    error = machine.refused("true", ROLLCALL_PYTHON="python3.9")
    assert "Python 3.11 to 3.13 is required; found: python3.9 is 3.9 (too old)." in error
    assert "found: none of /no/python runs" in machine.refused("true", ROLLCALL_PYTHON="/no/python")


def test_the_first_python_that_runs_and_fits_is_taken(machine: Machine) -> None:
    machine.program("python3", "#!/bin/sh\necho 3.10\n")
    machine.program("python3.13", "#!/bin/sh\necho 'pyenv: command not found' >&2; exit 127\n")
    machine.program("python3.12", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    assert machine.run("true", ROLLCALL_PYTHON="").returncode == 0
    assert f"--python {machine.bin}/python3.12 " in machine.calls()[0]


def test_uv_provides_a_python_where_none_fits(machine: Machine) -> None:
    for name in ("python3", "python3.13", "python3.12", "python3.11"):
        machine.program(name, "#!/bin/sh\nexit 127\n")
    find = f'[ "$1" = python ] && {{ [ "$2" = find ] && echo {sys.executable}; exit; }}\n'
    machine.program("uv", UV.replace("case", find + "case", 1))
    assert machine.run("true", ROLLCALL_PYTHON="").returncode == 0
    assert machine.calls()[0] == "uv python find >=3.11,<3.14"


def test_a_python_without_venv(machine: Machine) -> None:
    (machine.bin / "uv").unlink()
    no_venv = '[ "$1" = -m ] && { echo "ensurepip is not available."; exit 1; }\n'
    machine.program("python3", f'#!/bin/sh\n{no_venv}exec {sys.executable} "$@"\n')
    assert "apt install python3-venv" in machine.refused("true", ROLLCALL_PYTHON="python3")


def test_pip_installs_where_there_is_no_uv(machine: Machine) -> None:
    (machine.bin / "uv").unlink()
    venv = (
        '[ "$1" = -m ] && { mkdir -p "$3/bin" && cp "$FAKE/venv-python" "$3/bin/python"; exit; }\n'
    )
    machine.program("python3", f'#!/bin/sh\n{venv}exec {sys.executable} "$@"\n')
    assert machine.run("true", ROLLCALL_PYTHON="python3").returncode == 0
    (log,) = machine.envs.glob("*/install.log")
    pip = "/bin/python -m pip install --no-input --progress-bar=off torch>=2.11 torchvision\n"
    assert pip in log.read_text()


def test_a_folder_that_cannot_be_written(machine: Machine) -> None:
    blocked = machine.folder / "file"
    blocked.write_text("")
    error = machine.refused("true", ROLLCALL_ENVS=str(blocked / "envs"))
    assert f"{blocked}" in error and "Set ROLLCALL_ENVS to a folder that you may write" in error


def test_an_interpreter_that_has_gone(machine: Machine) -> None:
    machine.run("true")
    (python,) = machine.envs.glob("*/venv-*/bin/python")
    python.unlink()
    assert "delete that folder" in machine.refused("true")


def test_wrong_usage(machine: Machine) -> None:
    assert "no command given" in machine.refused("--quiet")
    assert "unknown option --fast" in machine.refused("--fast", "true")
    assert "usage: env/run [--quiet] [--with PACKAGES] CMD..." in machine.run("--help").stdout


@pytest.mark.long
def test_packages_of_ones_own_are_installed_once_beside_the_environment(machine: Machine) -> None:
    machine.run("true")
    [ready] = machine.envs.glob("*/ready")
    made = ready.parent / ready.read_text().strip()
    shutil.rmtree(made)
    made.symlink_to(sys.prefix)  # a real environment: with pip, and with packages to keep
    wheels = machine.folder / "wheels"
    wheel(wheels, "tiny")
    wheel(wheels, "greedy", needs="pydantic<1")
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    words = ["--with", "tiny", "python", "-c", "import tiny, yaml, sys; print(sys.prefix)"]
    machine.environ |= offline
    first = machine.run(*words)
    assert "installing tiny in" in first.stderr, first.stderr
    assert first.stdout.startswith(f"{machine.envs}/with-")
    (machine.folder / "test_tiny.py").write_text("import tiny\ndef test_it(): pass\n")
    tested = machine.run("--with", "tiny", "pytest", str(machine.folder / "test_tiny.py"))
    assert "1 passed" in tested.stdout, tested.stdout
    shutil.rmtree(wheels / "tiny-1.0-py3-none-any.whl", ignore_errors=True)
    again = machine.run(*words)
    assert (again.returncode, again.stdout, again.stderr) == (0, first.stdout, "")

    refused = machine.refused("--with=tiny,nosuchpackage-xyz", "true")
    assert "the package registry has no nosuchpackage-xyz. Correct the name" in refused
    refused = machine.refused("--with=greedy", "true")
    assert "--with greedy: no set of packages satisfies" in refused
    assert "keep their versions" in refused.replace("\n", " ")
    assert machine.run("python", "-c", "import tiny").returncode != 0


def test_the_sites_environments_serve_users_who_may_not_write_them(machine: Machine) -> None:
    site = machine.folder / "site"
    site.mkdir()
    lines = [f"# our own\n\n ROLLCALL_ENVS = '{site}/environments'", 'ROLLCALL_TORCH="cu126"']
    (site / "defaults").write_text("\n".join(lines))  # the last line does not end
    machine.environ |= {"ROLLCALL_SITE": str(site), "CUDA": "12.6"}
    del machine.environ["ROLLCALL_ENVS"]
    assert machine.run("true").returncode == 0
    [made] = (site / "environments").glob("*/ready")
    assert "-cu126-" in made.parent.name
    before = len(machine.calls())
    for driver in ("580.99.01", "570.10", ""):  # an update, and hosts of other kinds
        machine.driver(driver)
        assert machine.run("true").stderr == ""
    assert len(machine.calls()) == before
    shutil.rmtree(site / "environments" / "chosen")
    (site / "environments" / "chosen").touch()  # nothing can be written there, even by root
    done = machine.run("sh", "-c", "echo $VIRTUAL_ENV")
    assert done.stdout.startswith(str(site)), done.stderr
    (site / "defaults").write_text("ROLLCALL_ENV=/here\n")
    assert "defaults: expected ROLLCALL_ENVS=" in machine.refused("true")


TYPED = {
    "choose.py": "true",
    "turn.py": "true",
    "build.py": "true",
    "extras.py": "--with tiny true",
    "bin/rollcall": "rollcall --version",  # for bin/torchrun see multi/launch/test_launchers.py
}
"""For each program in env/ that env/run uses, the words after it that need it."""
OTHERS = {
    *("Dockerfile", "apptainer.def", "conda.yaml", "pixi.toml"),  # see test_env_files.py
    *("modules", "stage", "wheelhouse"),  # see test_env_scripts.py
    *("run", "rollcall_checkout.py"),  # see above
}


def test_every_file_of_env_is_needed_by_what_a_user_types(machine: Machine) -> None:
    here = {path.name for path in (ROOT / "env").iterdir()} - {"__pycache__"}
    assert here == {name.partition("/")[0] for name in TYPED} | OTHERS
    assert machine.run("true").returncode == 0
    [ready] = machine.envs.glob("*/ready")
    made = ready.parent / ready.read_text().strip()
    wheel(machine.folder / "wheels", "tiny")
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(machine.folder / "wheels")}
    for name, words in TYPED.items():
        copy = machine.folder / name.replace("/", "-") / "checkout"
        shutil.copytree(ROOT / "env", copy / "env", ignore=shutil.ignore_patterns("__pycache__"))
        for other in ("rollcall", "pyproject.toml"):
            (copy / other).symlink_to(ROOT / other)
        ready.unlink(missing_ok=True)
        if words != "true":  # with an environment that is there, and has Python's packages
            shutil.rmtree(made, ignore_errors=True)
            made.symlink_to(sys.prefix)
            ready.write_text(made.name)
        for is_there in (False, True):
            moved = copy / "env" / name
            moved.rename(copy / "away") if not is_there else (copy / "away").rename(moved)
            done = machine.run(*words.split(), root=copy, **offline)
            assert (done.returncode == 0) == is_there, (name, is_there, done.stderr)
        if made.is_symlink():
            made.unlink()
