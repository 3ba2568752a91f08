"""MPI for mpi4py and others: PMI, by which the MPI library of a rank finds the other ranks.

Each rank has a helper process, which answers the library on a socket and shares what it learns with
the helpers of all ranks. It speaks version 1 of the wire protocol of PMI, as MPICH, Intel MPI and
MVAPICH do (MPICH's src/pmi/src/pmi_v1.c). Open MPI understands only PMIx: use mpirun or srun.
"""

import os
import shlex
import socket

from rollcall.launch.frameworks.framework import Framework, Place, Store
from rollcall.process import die_with_parent

BARRIER = "barrier {}"


class _Server:
    """Answers the commands of one rank's library."""

    def __init__(self, place: Place, store: Store) -> None:
        self._place, self._store = place, store
        self._barriers = 0

    def answer(self, given: dict[str, str]) -> str:
        """Return the answer to a command, given as its words; empty if it gets none."""
        command, size = given.get("cmd", ""), self._place.world_size
        fixed = {
            "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1",
            "get_maxes": "cmd=maxes kvsname_max=256 keylen_max=256 vallen_max=1024",
            "get_appnum": "cmd=appnum appnum=0",
            "get_my_kvsname": "cmd=my_kvsname kvsname=rollcall",
            "get_universe_size": f"cmd=universe_size size={size}",
            "finalize": "cmd=finalize_ack",
        }
        if command in fixed:
            return f"{fixed[command]} rc=0"
        if command == "put":
            self._store.set(given["key"], given["value"])
            return "cmd=put_result rc=0 msg=success"
        if command == "get":
            return self._get(given["key"])
        if command == "barrier_in":
            self._barriers += 1
            name = BARRIER.format(self._barriers)
            if self._store.add(f"{name} count", 1) == size:
                self._store.set(name, "passed")
            self._store.get(name)  # waits for it
            return "cmd=barrier_out rc=0"
        return "" if command == "abort" else f"cmd={command} rc=-1 msg=unknown_command"

    def _get(self, key: str) -> str:
        value = ""
        if key == "PMI_process_mapping":
            blocks = (f"({first},{nodes},{ranks})" for first, nodes, ranks in self._place.blocks)
            value = f"(vector,{','.join(blocks)})"
        elif self._store.check([key]):
            value = self._store.get(key).decode()
        found = "rc=0 msg=success" if value else "rc=-1 msg=key_not_found"
        return f"cmd=get_result {found} value={value or 'unknown'}"


def _serve(place: Place, connection: socket.socket) -> None:
    with connection, connection.makefile("rw") as stream:
        server = _Server(place, place.store())
        for line in stream:
            words = dict(word.partition("=")[::2] for word in shlex.split(line))
            if answer := server.answer(words):
                stream.write(f"{answer}\n")
                stream.flush()
            else:
                return


def _variables(place: Place) -> dict[str, int]:
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        try:
            die_with_parent()
            theirs.close()
            _serve(place, ours)
        finally:
            os._exit(0)
    ours.close()
    os.set_inheritable(theirs.fileno(), True)
    return {
        "PMI_FD": theirs.detach(),
        "PMI_RANK": place.rank,
        "PMI_SIZE": place.world_size,
        "MPI_LOCALRANKID": place.local_rank,
        "MPI_LOCALNRANKS": place.local_world_size,
    }


FRAMEWORK = Framework(frozenset({"mpi4py", "horovod"}), _variables)
