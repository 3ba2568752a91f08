# Used by up, down, exec and status: where a lab's files are and which processes belong to it.
# shellcheck shell=bash

PATH=$PATH:/usr/sbin:/sbin # where Debian keeps daemons, ip and mount
readonly LABS=/var/lib/rollcall-lab
# Every host mounts its /tmp from a "device" named after the lab and the host, so /proc/PID/mountinfo
# shows which lab and host a process belongs to. No process ids need to be stored.
readonly MARK=rollcall-lab
# For the lab NAME, STATE is its directory and SLURM_CONF its configuration.
NAME=lab

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit "${EXIT_CODE:-1}"
}

# If the machine or the user cannot run a lab, the exit code is 3, so that the tests are skipped.
cannot() {
    EXIT_CODE=3 die "$@"
}

need_root() {
    ((EUID == 0)) || cannot "only root may make, enter or end the hosts of a lab: put sudo before $0"
}

use_lab() {
    [[ $1 =~ ^[a-z][a-z0-9-]{0,23}$ ]] ||
        die "--name '$1': expected a lower-case letter, then up to 23 letters, digits or dashes"
    NAME=$1
    STATE=$LABS/$NAME
    export SLURM_CONF=$STATE/slurm.conf
}

# lab_pids HOST-PATTERN: ids of all processes there: jobs, daemons and those that `exec` started.
lab_pids() {
    # grep fails for each process that ends meanwhile, so use its output, not its exit code.
    { grep -lsE " $MARK:$NAME:$1 " /proc/[0-9]*/mountinfo || true; } | tr -dc '0-9\n'
}

lab_exists() {
    [[ -d $STATE || $(lab_pids '[^ ]+') ]]
}

host_alive() {
    [[ -s $STATE/hosts/$1/pid ]] &&
        grep -qs " $MARK:$NAME:$1 " "/proc/$(<"$STATE/hosts/$1/pid")/mountinfo"
}

# enter HOST CMD...: replaces this shell by CMD in HOST, in this directory and environment.
enter() {
    local host=$1 init
    shift
    host_alive "$host" || die "the lab '$NAME' has no host '$host', or it is down: see ${0%/*}/status"
    init=$(<"$STATE/hosts/$host/pid")
    [[ -d /proc/$init/root$PWD ]] ||
        die "the host '$host' has no directory $PWD (each host has its own /tmp and /dev/shm)"
    # --wdns: look the directory up among the host's mounts.
    exec nsenter --target "$init" --mount --net --uts --cgroup --wdns="$PWD" -- "$@"
}

# freezer thaw|remove: thaw or remove the control groups that proctrack/cgroup made. The version 1
# freezer is mounted temporarily, because machines with only version 2 do not show it.
freezer() {
    # shellcheck disable=SC2016  # the inner shell expands
    unshare --mount bash -c '
        mount -t cgroup -o freezer none /sys/fs/cgroup 2>/dev/null || exit 0
        cd /sys/fs/cgroup && [[ -d $1 ]] || exit 0
        case $2 in
        thaw) find "$1" -name freezer.state -exec sh -c "echo THAWED >{}" \; ;;
        remove) find "$1" -depth -type d -exec rmdir {} + ;;
        esac' _ "$MARK-$NAME" "$1"
}

# parse_name USAGE ARGUMENT...: takes --name NAME; the other arguments go to REST.
parse_name() {
    local usage=$1
    shift
    if [[ ${1-} == --name ]]; then
        use_lab "${2-}"
        shift 2
    else
        use_lab lab
    fi
    REST=("$@")
    if [[ ${1-} == -* ]]; then die "$usage"; fi
}

# Ends every process of the lab and removes all its files. Needs only the lab's name.
remove_lab() {
    local deadline=$((SECONDS + 20)) pids
    while pids=$(lab_pids '[^ ]+') && [[ $pids ]]; do
        # shellcheck disable=SC2086  # one word per process id
        kill -KILL $pids 2>/dev/null || true
        freezer thaw # a frozen process, such as a suspended job, cannot be killed
        ((SECONDS < deadline)) || die "processes of the lab '$NAME' do not end: ${pids//$'\n'/ }"
        sleep 0.02
    done
    until freezer remove 2>/dev/null; do # a group stays busy for a moment after its last process
        ((SECONDS < deadline)) || die "cannot remove the control groups $MARK-$NAME of the freezer"
        sleep 0.02
    done
    rm -rf --one-file-system "$STATE"
    rmdir --ignore-fail-on-non-empty "$LABS" 2>/dev/null || true
}
