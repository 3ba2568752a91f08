"""Let another user of this machine attack a run, and check that every attack fails.

`sudo -E env PYTHONPATH=.:tests/helpers python tests/campaigns/second_user.py` starts a run of two
ranks as root, tries all attacks as the user nobody, and prints a table. The run must not notice: it
makes one attempt.
"""

from __future__ import annotations

import itertools
import os
import pickle
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
from checkout import PACED, ROOT
from lab import wait_until

from rollcall.launch.runs import find
from rollcall.records.attempt import NodeState
from rollcall.records.run_dir import RunDir
from rollcall.system import guard

NOBODY = 65534
ROLLCALL = [sys.executable, "-m", "rollcall"]
TRAIN = ["digits", "device=cpu", "model.name=mlp", "train.steps=1000000", "checkpoint.every=20"]
TRAIN += [PACED]
NEEDED = (sys.base_prefix, sys.prefix)
MOUNT = """
for number in 1 2; do mount --bind "${!number}" needed-$number; done
for closed in $3; do mount -t tmpfs -o mode=755 none "$closed"; done
for number in 1 2; do
    mkdir -p "${!number}"
    mount --bind needed-$number "${!number}"
done
shift 3
exec "$@"
"""
"""Opens to the other user what is around Python, for the time of one command."""
LIMIT = 300
"""Seconds for a command, on a machine that does other work too."""


def _closed() -> Iterator[str]:
    """Yield the directories around Python that others may not enter."""
    for place in NEEDED:
        around = [*reversed(Path(place).parents), Path(place)]
        closed = [str(each) for each in around if not each.stat().st_mode & 0o001]
        yield from closed[:1]


FILES = {
    "configuration": "config.yaml",
    "events": "events.jsonl",
    "metrics": "metrics.jsonl",
    "attempts": "job/attempts.jsonl",
    "submissions": "job/submissions.jsonl",
    "output of a rank": "logs/attempt-0/node-0/rank-0.log",
    "claim": "claim-0",
}
COMMANDS = (
    *("why {run}", "logs {run}", "stacks {run}", "attach {run} id", "cancel {run}"),
    *("requeue {run}", "report {run} -o /dev/null", "profile {run}", "drill {run} kill-rank --yes"),
    *("compare {run} {run}", "predict {run} --output /dev/null device=cpu"),
    *("checkpoint verify {run}", "train digits run.root={root} run.name=victim device=cpu"),
)
"""Commands of rollcall about the run, typed by the other user; each must end with an error."""


class Stranger:
    """The other user, with the rights of nobody, a copy of rollcall, and Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for number in (1, 2):
            (folder / f"needed-{number}").mkdir(parents=True)
        self.code = folder / "code"
        shutil.copytree(ROOT / "rollcall", self.code / "rollcall")
        for path in (self.code, *self.code.rglob("*")):
            path.chmod(0o755)
        os.chown(folder, NOBODY, NOBODY)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run Python with these words in the home directory of the other user."""
        user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        closed = " ".join(dict.fromkeys(_closed()))
        enter = ["unshare", "--mount", "bash", "-ec", MOUNT, "mount", *NEEDED, closed, *user]
        return subprocess.run(
            [*enter, sys.executable, *words],
            cwd=self.folder,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.folder),
                "PYTHONPATH": str(self.code),
            },
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )

    def succeeds(self, code: str) -> bool:
        """Run Python code; return True if it raises nothing."""
        return self.run("-c", code).returncode == 0


@contextmanager
def training(root: Path) -> Iterator[RunDir]:
    """Let a run train on two nodes of this machine."""
    run = RunDir(root, "victim")
    words = ["submit", "--local", "--nodes=2", "--nproc-per-node=1", "--wait", f"--root={root}"]
    with (root / "output").open("w") as output:
        submit = subprocess.Popen(
            [*ROLLCALL, *words, "--name=victim", *TRAIN], cwd=ROOT, stdout=output, stderr=output
        )
    try:

        def has_saved() -> bool:
            return bool(run.read_events("checkpointed")) or submit.poll() is not None

        wait_until(has_saved, LIMIT, lambda: (root / "output").read_text())
        yield run
        assert submit.poll() is None, (root / "output").read_text()
    finally:
        submit.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            submit.wait(60)
        for process in psutil.process_iter(["cmdline"]):
            if str(run.path) in " ".join(process.info["cmdline"] or []):
                process.kill()
        submit.kill()
        submit.wait()


def attacks(run: RunDir, stranger: Stranger) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield each attack: what it wants, and a function that returns True if it succeeds."""
    yield from _on_files(run, stranger)
    yield from _on_processes(run, stranger)
    yield from _on_ports(run, stranger)
    yield from _with_commands(run, stranger)
    yield from _with_traps(run, stranger)


def _on_files(run: RunDir, stranger: Stranger) -> Iterator[tuple[str, Callable[[], bool]]]:
    checkpoint = max(run.checkpoints.glob("step-*"))
    files = {name: run.path / path for name, path in FILES.items()}
    files |= {"checkpoint": checkpoint / "manifest.json", "code": run.code / "pyproject.toml"}
    for name, path in files.items():
        yield f"read: {name}", lambda path=path: stranger.succeeds(f"open({str(path)!r}).read()")  # type: ignore[misc]
        yield f"write: {name}", lambda path=path: stranger.succeeds(f"open({str(path)!r}, 'a')")  # type: ignore[misc]
    place = str(run.path)
    yield "list the run", lambda: stranger.succeeds(f"import os; os.listdir({place!r})")
    yield "rename the run", lambda: stranger.succeeds(f"import os; os.rename({place!r}, '/tmp/x')")
    yield "open the run", lambda: stranger.succeeds(f"import os; os.chmod({place!r}, 0o777)")
    yield (
        "read shared memory",
        lambda: stranger.succeeds(
            "import os, pathlib; [os.close(os.open(p, os.O_RDONLY)) for p in "
            "pathlib.Path('/dev/shm').glob('torch_*')] or exit(1)"
        ),
    )


def _on_processes(run: RunDir, stranger: Stranger) -> Iterator[tuple[str, Callable[[], bool]]]:
    for process in _family(run)[:4]:
        words = "mem", "environ", "cwd", "fd"
        code = "; ".join(f"print(os.stat('/proc/{process.pid}/{word}/.'))" for word in words[2:])
        reads = f"import os; open('/proc/{process.pid}/environ').read(); {code}"
        yield f"look into process {process.name()}", lambda code=reads: stranger.succeeds(code)  # type: ignore[misc]
        ends = f"import os; os.kill({process.pid}, 15)"
        yield f"end process {process.name()}", lambda code=ends: stranger.succeeds(code)  # type: ignore[misc]


def _on_ports(run: RunDir, stranger: Stranger) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Send garbage to every port; it succeeds if the run starts again."""
    pickled = pickle.dumps(ValueError("x"))
    texts = (b"GET / HTTP/1.0\r\n\r\n", pickled, os.urandom(4096), b"\0" * 100_000)
    for port in _ports(run):

        def disturb(port: int = port) -> bool:
            with ExitStack() as stack:
                for number in range(100):
                    try:
                        link = socket.create_connection(("127.0.0.1", port), 2)
                        stack.enter_context(link)
                        link.sendall(texts[number % len(texts)])
                    except TimeoutError:  # nothing more fits into the queue of this port
                        break
                    except OSError:
                        continue
                time.sleep(3)
            return len(find.attempts(run)) > 1

        yield "disturb a port", disturb
    yield from _on_store(run, stranger)


USE = """
import os, signal
from datetime import timedelta
from torch.distributed import TCPStore
pids = []
for port in {ports}:
    pids.append(os.fork())
    if pids[-1] == 0:
        signal.alarm(30)  # other servers let a client of the store wait
        try:
            TCPStore({host!r}, port, timeout=timedelta(seconds=3)).{call}
        except BaseException:
            os._exit(1)
        os._exit(0)
codes = [os.waitpid(pid, 0)[1] for pid in pids]
exit(0 not in codes)
"""


def _on_store(run: RunDir, stranger: Stranger) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Use the store, whichever port it has."""
    uses = {"write into": "set('a', 'b')", "read": "list_keys()"}
    for (what, call), host in itertools.product(uses.items(), ("127.0.0.1", guard.INNER)):
        code = USE.format(ports=_ports(run), host=host, call=call)
        if host != guard.INNER:  # or all attacks would fail for another reason
            own = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            assert own.returncode == 0, own.stderr
        yield f"{what} the store at {host}", lambda code=code: stranger.succeeds(code)  # type: ignore[misc]


def _with_commands(run: RunDir, stranger: Stranger) -> Iterator[tuple[str, Callable[[], bool]]]:
    for command in COMMANDS:

        def typed(command: str = command) -> bool:
            words = shlex.split(command.format(run=run.path, root=run.path.parent))
            done = stranger.run(*ROLLCALL[1:], *words)
            assert "Traceback" not in done.stderr, done.stderr
            return done.returncode == 0

        yield f"rollcall {command.split()[0]}", typed


def _with_traps(run: RunDir, stranger: Stranger) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Plant files and directories in a root that both users may write to."""
    shared = run.path.parent.parent / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    mark = stranger.folder / "mark"

    def mine(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*ROLLCALL, *words],
            cwd=shared,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )

    def plant(code: str) -> None:
        code = f"import os, pathlib; p = pathlib.Path({str(shared)!r}); {code}"
        assert stranger.succeeds(code), code

    submit = ("submit", "--local", "--wait", "--nproc-per-node=1", f"--root={shared}")

    def made_before() -> bool:
        plant("(p / 'made').mkdir(mode=0o777)")
        return mine(*submit, "--name=made", "digits", "train.steps=1").returncode == 0

    def linked() -> bool:
        plant("(p / 'linked').symlink_to('/etc')")
        return mine(*submit, "--name=linked", "digits", "train.steps=1").returncode == 0

    def code_store() -> bool:
        plant("(p / '.code').mkdir(mode=0o777); (p / '.code').chmod(0o777)")
        mine(*submit, "--name=stored", "digits", "train.steps=1")
        return any((shared / ".code").rglob("*.py"))

    def pipes() -> bool:
        plant("(p / 'pipe' / 'job').mkdir(parents=True); os.mkfifo(p / 'pipe' / 'verdict.json')")
        plant("(p / 'pipe' / 'events.jsonl').touch(); os.mkfifo(p / 'pipe' / 'job/attempts.jsonl')")
        return mine("status", f"--root={shared}").returncode != 0

    def screen() -> bool:
        plant(r"(p / 'evil\x1b]0;title\x07').mkdir(); (p / 'evil\x1b]0;title\x07/job').mkdir()")
        return "\x1b" in mine("status", f"--root={shared}").stdout

    names_a_command = f"model: {{name: 'subprocess:Popen', args: {{args: [touch, {mark}]}}}}"
    names_a_module, module = "model: {name: 'theirs:Net'}", f"open({str(mark)!r}, 'w')"

    def popen(*words: str) -> Callable[[], bool]:
        def used() -> bool:
            plant("(p / 'run').mkdir(exist_ok=True)")
            plant(f"(p / 'run/config.yaml').write_text({names_a_command!r})")
            plant(f"(p / 'evil.yaml').write_text({names_a_command!r})")
            done = mine(*words)
            return mark.exists() or done.returncode == 0

        return used

    def their_module() -> bool:
        plant(f"(p / 'theirs.py').write_text({module!r})")
        plant(f"(p / 'own.yaml').write_text({names_a_module!r})")
        done = mine("train", "own.yaml", "device=cpu", "train.steps=1")
        return mark.exists() or done.returncode == 0

    yield "a run directory made before", made_before
    yield "a link in place of a run", linked
    yield "a store of code made before", code_store
    yield "pipes in place of records", pipes
    yield "a name that controls the terminal", screen
    yield "a recipe that names a command", popen("train", "evil.yaml", "device=cpu")
    yield "a run that names a command: predict", popen("predict", "run", "--output=p.jsonl")
    yield "a run that names a command: generate", popen("generate", "run", "--tokens=1")
    yield "a recipe that names a module beside it", their_module


def _family(run: RunDir) -> list[psutil.Process]:
    """Return the supervisors and all that they have started."""
    parts = NodeState.read_all(run.path, attempt=0).values()
    supervisors = [psutil.Process(part.supervisor) for part in parts]
    below = [child for each in supervisors for child in each.children(recursive=True)]
    return [each for each in (*supervisors[:1], *below) if each.is_running()]


def _ports(run: RunDir) -> list[int]:
    """Return the ports at which the run's processes listen."""
    ports = set()
    for process in _family(run):
        with suppress(psutil.NoSuchProcess):  # it had something short to do
            links = process.net_connections("tcp")
            ports |= {link.laddr.port for link in links if link.status == psutil.CONN_LISTEN}
    return sorted(ports)


def campaign(folder: Path, share: int = 1) -> tuple[dict[str, str], bool]:
    """Try each `share`-th attack; return what came of them, and whether all of them failed."""
    folder.chmod(0o755)
    root = folder / "runs"
    root.mkdir()
    stranger, results = Stranger(folder / "stranger"), dict[str, str]()
    control = stranger.run(*ROLLCALL[1:], "--help")  # or all attacks would fail for another reason
    assert control.returncode == 0 and stranger.succeeds("import torch"), control.stderr
    with training(root) as run:
        numbered = enumerate(attacks(run, stranger), start=1)
        first = random.randrange(share)
        for number, (name, attack) in itertools.islice(numbered, first, None, share):
            succeeded = attack()
            results[f"{number} {name}"] = "SUCCEEDED" if succeeded else "fails"
        attempts = len(find.attempts(run))
    results["the run starts again"] = "SUCCEEDED" if attempts > 1 else "fails"
    return results, "SUCCEEDED" not in results.values()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="second-user-") as name:
        table, is_held = campaign(Path(name))
    for what, result in table.items():
        print(f"{result:10} {what}")
    counts = [*table.values()]
    print(f"{len(counts)} attacks: {counts.count('fails')} fail")
    sys.exit(not is_held)
