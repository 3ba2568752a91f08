"""Node lists as Slurm writes them, routes as the kernel knows them, ports that stay."""

import pytest

from rollcall.system import hosts

LISTS = [
    ("n1", ["n1"]),
    ("n[1-3]", ["n1", "n2", "n3"]),
    ("n[08-11]", ["n08", "n09", "n10", "n11"]),
    ("n[1,3-4,007]", ["n1", "n3", "n4", "n007"]),
    ("rack[1-2]node[3-4]", ["rack1node3", "rack1node4", "rack2node3", "rack2node4"]),
    ("a[1-2]-ib,login,b3", ["a1-ib", "a2-ib", "login", "b3"]),
    ("", []),
]


@pytest.mark.parametrize(("nodelist", "names"), LISTS)
def test_expand(nodelist: str, names: list[str]) -> None:
    assert hosts.expand(nodelist) == names
    assert sorted(hosts.expand(hosts.fold(names))) == sorted({*names})


def test_fold_writes_a_node_list_as_slurm_does() -> None:
    names = [*(f"gpu{number:03d}" for number in range(1, 129)), "gpu200", "n9", "n10", "login"]
    assert hosts.fold(names) == "gpu[001-128,200],login,n10,n9"
    assert hosts.fold([]) == ""


@pytest.mark.parametrize("nodelist", ["n[1-", "n1]", "n[a-b]", "n[3-1]", "n[]", "n[1-2-3]"])
def test_what_is_no_node_list_is_refused(nodelist: str) -> None:
    with pytest.raises(ValueError, match="is not a node list"):
        hosts.expand(nodelist)


def test_hosts_of_a_job_with_groups_come_in_the_order_of_their_numbers() -> None:
    env = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_STEP_NODELIST": "n[1-3]"}
    assert hosts.of_job(env) == hosts.of_step(env) == ["n1", "n2", "n3"]
    env |= {"SLURM_JOB_NODELIST_HET_GROUP_0": "n3", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[1-2]"}
    env |= {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST": "n3"}  # as the script sees it (22.05)
    assert hosts.of_job(env) == hosts.of_step(env) == ["n3", "n1", "n2"]
    assert hosts.of_step(env | {"SLURM_STEP_NODELIST": "n[1-2]"}) == ["n1", "n2"]


def test_ranks_of_nodes() -> None:
    assert hosts.ranks_of_nodes("4", 2) == (4, 4)
    assert hosts.ranks_of_nodes("1,2,2", 3) == (1, 2, 2)
    for text, message in (("1,0", "expected a number"), ("1,2", "2 nodes, and the run has 3")):
        with pytest.raises(ValueError, match=message):
            hosts.ranks_of_nodes(text, 3)


def test_route_to_a_host_that_nobody_knows_names_it() -> None:
    with pytest.raises(hosts.HostError, match=r"cannot resolve the host name 'nowhere\.invalid'"):
        hosts.route("nowhere.invalid")


@pytest.mark.parametrize("peer", ["localhost", "127.0.1.1"])
def test_a_peer_on_the_loopback_is_refused(peer: str) -> None:
    with pytest.raises(hosts.HostError, match=f"'{peer}' resolves to the loopback address"):
        hosts.route(peer)


def test_port_is_the_same_for_the_same_key_and_outside_the_ephemeral_range() -> None:
    ports = [hosts.port(f"{job}.0.0") for job in range(1000)]
    assert ports == [hosts.port(f"{job}.0.0") for job in range(1000)]
    assert min(ports) >= 20000 and max(ports) < 30000
    assert len(set(ports)) > 900  # jobs side by side seldom meet
