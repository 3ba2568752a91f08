#!/usr/bin/env bash
# host.sh NAME HOST STATE PROCTRACK [SHARED-DIR...]: started by `up` in new mount, network and UTS
# namespaces; makes them one host of the lab NAME, then sleeps to keep them.
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
    # slurmd names its group after the node alone. In a cgroup namespace of its own, the lab's n1 is
    # not another lab's n1. The freezer is the one controller that proctrack/cgroup uses, and a
    # version 1 freezer can be mounted beside version 2 as well.
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
