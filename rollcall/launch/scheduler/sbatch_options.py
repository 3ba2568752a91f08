"""The options of sbatch from Slurm 20.11 to 26.05, with the pyxis plugin's."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from rollcall.config import yaml_values
from rollcall.messages import text

_FLAGS = """
consolidate-segments contiguous exclusive get-user-env help hold ignore-pbs nice no-kill
no-requeue oom-kill-step overcommit oversubscribe parsable propagate quiet reboot requeue
resv-ports spread-job spread-segments stepmgr test-only usage use-min-nodes verbose version wait
x11 container-mount-home no-container-mount-home container-writable container-readonly
container-remap-root no-container-remap-root container-entrypoint no-container-entrypoint
"""
FLAGS = frozenset(_FLAGS.split())
"""Options without a value, or with an optional one after `=`."""

_WITH_VALUE = """
account acctg-freq array batch bb bbf begin chdir cluster cluster-constraint clusters comment
constraint container container-id container-type core-spec cores-per-socket cpu-freq
cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude export
export-file extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket
gpus-per-task gres gres-flags hint input job-name kill-on-invalid-dep licenses mail-type
mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile nodelist nodes
ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output
partition power prefer priority profile qos reservation segment signal sockets-per-node switches
tasks-per-node thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid
wait-all-nodes wckey wrap container-image container-mounts container-workdir container-name
container-save container-env
"""
WITH_VALUE = frozenset(_WITH_VALUE.split())
"""Options that take a value."""

ELSEWHERE = {
    "walltime": "time",
    "timeout": "time",
    "time-limit": "time",
    "queue": "partition",
    "memory": "mem",
    "project": "account",
}
"""Options of other schedulers, and what sbatch calls them."""

SHORT = {
    **{"A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint"},
    **{"c": "cpus-per-task", "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile"},
    **{"G": "gpus", "H": "hold", "h": "help", "i": "input", "J": "job-name", "k": "no-kill"},
    **{"L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes", "n": "ntasks"},
    **{"O": "overcommit", "o": "output", "p": "partition", "Q": "quiet", "q": "qos"},
    **{"S": "core-spec", "s": "oversubscribe", "t": "time", "V": "version", "v": "verbose"},
    **{"W": "wait", "w": "nodelist", "x": "exclude"},
}

_ENVIRONMENT = """
account acctg-freq batch cluster-constraint clusters consolidate-segments constraint container
container-id container-type core-spec cpus-per-gpu delay-boot distribution error exclusive
export get-user-env gpu-bind gpu-freq gpus gpus-per-node gpus-per-task gres gres-flags hint
input job-name mem-bind mem-per-cpu mem-per-gpu network no-kill no-requeue open-mode output
overcommit partition power profile qos requeue reservation signal spread-job spread-segments
thread-spec threads-per-core tres-bind tres-per-task use-min-nodes wait wait-all-nodes wckey
"""
ENVIRONMENT = {f"SBATCH_{name.upper().replace('-', '_')}": name for name in _ENVIRONMENT.split()}
ENVIRONMENT |= {
    **{"SBATCH_ARRAY_INX": "array", "SBATCH_MEM_PER_NODE": "mem", "SBATCH_TIMELIMIT": "time"},
    **{"SBATCH_REQ_SWITCH": "switches", "SBATCH_SEGMENT_SIZE": "segment"},
    **{"SBATCH_BURST_BUFFER": "bb", "SBATCH_CPU_FREQ_REQ": "cpu-freq"},
}
"""The options of sbatch that have a variable, by its name."""

ONE_OF = (
    frozenset({"mem", "mem-per-cpu", "mem-per-gpu"}),
    frozenset({"requeue", "no-requeue"}),
    frozenset({"cpus-per-task", "cpus-per-gpu"}),
    frozenset({"gpus", "gpus-per-node", "gpus-per-task"}),
)
"""Options of which one replaces the others."""


def wrong_value(passed: Mapping[str, str | None]) -> str:
    """Return the refusal of a value, for a run without an sbatch that would check it."""
    forms = yaml_values.load(Path(__file__).with_name("sbatch_values.yaml").read_text())
    for names, (form, expected) in forms.items():
        for name in passed.keys() & {*names.split()}:
            value = passed[name]
            if value is not None and not re.fullmatch(form, value, re.IGNORECASE):
                return f"--{name}: expected {expected}, not '{value}'"
    return ""


def did_you_mean(option: str, own: Iterable[str] = ()) -> str:
    """Return the part of a refusal that names the option meant; empty unless it looks like one."""
    if option in ELSEWHERE:
        return f", did you mean '--{ELSEWHERE[option]}'?"
    return text.did_you_mean(option, sorted({*own, *FLAGS, *WITH_VALUE}), 0.8, "--")
