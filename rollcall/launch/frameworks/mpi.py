"""MPI for mpi4py and others: PMI, by which the MPI library of a rank finds the other ranks.

A helper process of each rank answers the library on a socket, and shares its values with the
helpers of all ranks. It speaks version 1 of the PMI wire protocol, like MPICH, Intel MPI and
MVAPICH (MPICH's src/pmi/src/pmi_v1.c). Open MPI understands only PMIx: use mpirun or srun.
"""

import os
import shlex
import socket
import uuid

from rollcall.launch.frameworks.framework import Framework, KeyValueStore, RankContext
from rollcall.system.process import die_with_parent


class _Server:
    def __init__(self, context: RankContext, store: KeyValueStore) -> None:
        self._context, self._store = context, store
        self._barriers, self._id = 0, uuid.uuid4().hex

    def answer(self, given: dict[str, str]) -> str:
        """Return the answer to a command, given as its words; empty if none is sent."""
        command, size = given.get("cmd", ""), self._context.world_size
        fixed = {
            "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1",
            "get_maxes": "cmd=maxes kvsname_max=256 keylen_max=256 vallen_max=1024",
            "get_appnum": "cmd=appnum appnum=0",
            "get_universe_size": f"cmd=universe_size size={size}",
            "finalize": "cmd=finalize_ack",
        }
        if command in fixed:
            return f"{fixed[command]} rc=0"
        if command == "get_my_kvsname":
            if self._context.rank == 0:  # MPICH names its shared memory on a node after it
                self._store.set("name of the job", f"rollcall-{self._id}")
            name = self._store.get("name of the job").decode()
            return f"cmd=my_kvsname kvsname={name} rc=0"
        if command == "put":
            self._store.set(given["key"], given["value"])
            return "cmd=put_result rc=0 msg=success"
        if command == "get":
            return self._get(given["key"])
        if command == "barrier_in":
            self._barriers += 1
            name = f"barrier {self._barriers}"
            if self._store.add(f"{name} count", 1) == size:
                self._store.set(name, "passed")
            self._store.get(name)  # waits for the last rank
            return "cmd=barrier_out rc=0"
        return "" if command == "abort" else f"cmd={command} rc=-1 msg=unknown_command"

    def _get(self, key: str) -> str:
        value = ""
        if key == "PMI_process_mapping":
            blocks = (f"({first},{nodes},{ranks})" for first, nodes, ranks in self._context.blocks)
            value = f"(vector,{','.join(blocks)})"
        elif self._store.check([key]):
            value = self._store.get(key).decode()
        if value:
            return f"cmd=get_result rc=0 msg=success value={value}"
        return "cmd=get_result rc=-1 msg=key_not_found value=unknown"


def _serve(context: RankContext, connection: socket.socket) -> None:
    with connection, connection.makefile("rw") as stream:
        server = _Server(context, context.store())
        for line in stream:
            words = dict(word.partition("=")[::2] for word in shlex.split(line))
            if answer := server.answer(words):
                stream.write(f"{answer}\n")
                stream.flush()
            else:
                return


def _variables(context: RankContext) -> dict[str, int]:
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        try:
            die_with_parent()
            theirs.close()
            _serve(context, ours)
        finally:
            os._exit(0)
    ours.close()
    os.set_inheritable(theirs.fileno(), True)
    return {
        "PMI_FD": theirs.detach(),
        "PMI_RANK": context.rank,
        "PMI_SIZE": context.world_size,
        "MPI_LOCALRANKID": context.local_rank,
        "MPI_LOCALNRANKS": context.local_world_size,
    }


FRAMEWORK = Framework(frozenset({"mpi4py", "horovod"}), _variables)
