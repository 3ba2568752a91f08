"""JAX: `jax.distributed.initialize()` finds the coordinator and its place without arguments.

JAX reads the coordinator from its own variable, but the number and the place of a process only from
a launcher that it knows. It knows Open MPI's by these variables (jax/_src/clusters/ompi_cluster.py,
0.4 to 0.10); the URI itself is not used if the coordinator is given.
"""

import socket
import sys

from rollcall import hosts
from rollcall.launch.frameworks.framework import Framework, Place


def _variables(place: Place) -> dict[str, object]:
    coordinator = place.addresses()[0]
    if place.local_rank == 0 and place.nodes > 1 and not coordinator.startswith(("127.", "[::1]")):
        _check_own_name()
    return {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": place.world_size,
        "JAX_PROCESS_ID": place.rank,
        "OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{coordinator}",
        "OMPI_COMM_WORLD_SIZE": place.world_size,
        "OMPI_COMM_WORLD_RANK": place.rank,
        "OMPI_COMM_WORLD_LOCAL_RANK": place.local_rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": place.local_world_size,
    }


def _check_own_name() -> None:
    """Say so if JAX on CPUs, which takes no address, would listen where no other host connects."""
    try:
        hosts.route(socket.gethostname())
    except hosts.HostError as error:
        print(f"rollcall: {error}. On CPUs, JAX cannot connect its processes", file=sys.stderr)


FRAMEWORK = Framework(frozenset({"jax", "flax", "optax", "equinox"}), _variables)
