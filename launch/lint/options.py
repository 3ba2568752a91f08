"""Which options does sbatch know? Those of Slurm 22.05 to 25.05, and pyxis' own."""

from __future__ import annotations

_FLAGS = """
contiguous exclusive get-user-env help hold ignore-pbs nice no-kill no-requeue oom-kill-step
overcommit oversubscribe parsable propagate quiet reboot requeue resv-ports spread-job stepmgr
test-only usage use-min-nodes verbose version wait x11 container-mount-home
no-container-mount-home container-writable container-readonly container-remap-root
no-container-remap-root container-entrypoint no-container-entrypoint
"""
FLAGS = frozenset(_FLAGS.split())
"""Options that take no value, or only one behind `=`."""

_WITH_VALUE = """
account acctg-freq array batch bb bbf begin chdir cluster cluster-constraint clusters comment
constraint consolidate-segments container container-id core-spec cores-per-socket cpu-freq
cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude export
export-file extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket
gpus-per-task gres gres-flags hint input job-name kill-on-invalid-dep licenses mail-type
mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile nodelist nodes
ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output
partition power prefer priority profile qos reservation segment signal sockets-per-node
spread-segments switches tasks-per-node thread-spec threads-per-core time time-min tmp tres-bind
tres-per-task uid wait-all-nodes wckey wrap container-image container-mounts container-workdir
container-name container-save container-env
"""
WITH_VALUE = frozenset(_WITH_VALUE.split())
"""Options that take a value."""

SHORT = {
    **{"A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint"},
    **{"c": "cpus-per-task", "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile"},
    **{"G": "gpus", "H": "hold", "h": "help", "i": "input", "J": "job-name", "k": "no-kill"},
    **{"L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes", "n": "ntasks"},
    **{"O": "overcommit", "o": "output", "p": "partition", "Q": "quiet", "q": "qos"},
    **{"S": "core-spec", "s": "oversubscribe", "t": "time", "V": "version", "v": "verbose"},
    **{"W": "wait", "w": "nodelist", "x": "exclude"},
}

_SRUN_FLAGS = """
disable-status exact kill-on-bad-exit label multi-prog no-allocate overlap preserve-env pty
unbuffered immediate E H I K O Q X Z k l s u v
"""
SRUN_FLAGS = frozenset(_SRUN_FLAGS.split())
"""Further options of srun that take no value, or only one right behind them."""
