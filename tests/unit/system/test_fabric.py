"""The fabric of a host, from planted files of the kernel, and the variables that follow from it."""

from pathlib import Path

import pytest

from rollcall.system import fabric

PORT = "sys/class/infiniband/{}/ports/1/link_layer"
HOSTS = {
    "slingshot": {"sys/class/cxi/cxi0/device": "", "sys/class/net/hsn0/speed": "200000"},
    "efa": {
        "sys/bus/pci/drivers/efa/0000:10:1b.0/vendor": "0x1d0f",
        PORT.format("rdmap16s27"): "Unspecified",
    },
    "infiniband": {PORT.format("mlx5_0"): "InfiniBand", PORT.format("mlx5_1"): "Ethernet"},
    "roce": {PORT.format("mlx5_0"): "Ethernet", "sys/class/net/eth0/speed": "200000"},
    "tcp-100g": {"sys/class/net/eth0/speed": "100000", "sys/class/net/lo/mtu": "65536"},
    "tcp": {"sys/class/net/eth0/speed": "25000", "sys/class/net/eth1/speed": "-1"},
}


def plant(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return str(root)


@pytest.mark.parametrize("name", HOSTS)
def test_a_fabric_is_recognised(name: str, tmp_path: Path) -> None:
    root = plant(tmp_path, HOSTS[name])
    assert fabric.recognise(root) == name
    entries = fabric.table()[name].get("set", {})
    assert fabric.settings({}, root) == {it: entry["value"] for it, entry in entries.items()}


def test_every_fabric_has_a_test_and_every_setting_a_reason() -> None:
    assert [*fabric.table()] == [*HOSTS]
    for entry in fabric.table().values():
        for setting in entry.get("set", {}).values():
            assert setting["why"] and setting["source"].startswith("https://")


def test_what_somebody_has_set_stays(tmp_path: Path) -> None:
    root = plant(tmp_path, HOSTS["slingshot"])
    everything = fabric.settings({"HOME": "/home/me"}, root)
    plant(tmp_path, {"etc/nccl.conf": "# site\nNCCL_CROSS_NIC = 0"})
    plant(tmp_path, {"home/me/.nccl.conf": "NCCL_NET_GDR_LEVEL=SYS"})
    left = fabric.settings({"HOME": "/home/me", "FI_MR_CACHE_MONITOR": ""}, root)
    mine = {"NCCL_CROSS_NIC", "NCCL_NET_GDR_LEVEL", "FI_MR_CACHE_MONITOR"}
    assert everything.keys() - left.keys() == mine
    other = {"HOME": "/home/me", "NCCL_CONF_FILE": "/other.conf"}
    assert "NCCL_NET_GDR_LEVEL" in fabric.settings(other, root)  # NCCL reads that file instead
