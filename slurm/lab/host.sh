#!/usr/bin/env bash
# host.sh NAME HOST STATE PROCTRACK [SHARED-DIR...]: `up` starts this in new mount, network and UTS
# namespaces; it makes them a host of the lab NAME, then sleeps to keep them alive.
set -euo pipefail
# shellcheck source=SCRIPTDIR/lab.sh
source "${BASH_SOURCE%/*}/lab.sh"
name=$1 host=$2 state=$3 proctrack=$4
shift 4

hostname "$host"
mount --bind /tmp "$state/outside"
mount -t tmpfs -o mode=1777 "$MARK:$name:$host" /tmp
for shared in "$@"; do
    mkdir -p "$shared"
    mount --bind "$state/outside/${shared#/tmp/}" "$shared"
done
umount "$state/outside"
mount -t tmpfs -o mode=1777 "$MARK:$name:$host" /dev/shm
mount --bind "$state/hosts/$host/hosts" /etc/hosts
ip link set lo up

if [[ $proctrack == cgroup ]]; then
    # slurmd names its group after the node only. A separate cgroup namespace keeps this lab's n1 apart
    # from another lab's n1. proctrack/cgroup uses only the freezer controller, and a version 1
    # freezer can be mounted beside version 2.
    freezer=$state/cgroup/freezer
    mount -t cgroup -o freezer "$MARK" "$freezer"
    mkdir -p "$freezer/$MARK-$name"
    echo $$ >"$freezer/$MARK-$name/cgroup.procs"
    umount "$freezer"
    # shellcheck disable=SC2016  # the inner shell expands
    exec unshare --cgroup bash -euc '
        mount -t cgroup -o freezer "$1" "$2"
        echo $$ >"$3"
        exec sleep infinity' _ "$MARK" "$freezer" "$state/hosts/$host/pid"
fi
echo $$ >"$state/hosts/$host/pid"
exec sleep infinity
