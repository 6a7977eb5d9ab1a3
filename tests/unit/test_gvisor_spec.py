"""What runsc is told, the marks of checked disks, and the control socket's fallback."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv_run.drivers import gvisor_checked, gvisor_sentry
from aenv_run.drivers.gvisor_spec import DAEMON, Container, addresses, describe, flags
from aenv_run.drivers.protocol import NetworkSlot
from aenv_run.paths import Home
from aenv_run.types import MachineSpec

SLOT = NetworkSlot(
    "veth", Path("/run/netns/r"), Path("/run/netns/g"), "eth0", "52:54:00:00:00:01", "10.0.2.15", "10.0.2.2",
    "10.0.2.3", "100.96.0.1",
)  # fmt: skip
CONTAINER = Container(MachineSpec(cpus=2, memory_mib=256), Path("/d/root"), Path("/g/envd"), SLOT, "aenv-1")


def text(container: Container) -> str:
    return json.dumps(describe(container))


def test_limits_and_network_are_those_of_the_machine() -> None:
    said = text(CONTAINER)
    assert '"limit": 268435456' in said and '"quota": 200000' in said and "/run/netns/g" in said
    assert "10.0.2.3" in said and "/d/root" in said
    bare = text(dataclasses.replace(CONTAINER, network=None, cgroup=None))
    assert "resources" not in bare and "cgroupsPath" not in bare and "netns" not in bare
    assert describe(CONTAINER)["process"] == describe(dataclasses.replace(CONTAINER, network=None))["process"]


def test_what_must_be_equal_at_a_restore_does_not_depend_on_the_sandbox() -> None:
    other = dataclasses.replace(CONTAINER, root=Path("/e/root"), cgroup="aenv-2", network=None)
    assert json.dumps(describe(CONTAINER)["mounts"]) == json.dumps(describe(other)["mounts"])
    assert DAEMON in json.dumps(describe(other)["mounts"])
    with_network, without = (flags(Path("/r"), "systrap", network=on, cgroups=True) for on in (True, False))
    assert [one for one in with_network if "network" not in one] == [
        one for one in without if "network" not in one
    ]
    assert "--overlay2=none" in with_network and "--net-disconnect-ok" in with_network


@pytest.mark.parametrize("address", ["10.0.2.15", "10.0.2.15/24"])
def test_addresses_are_put_back(address: str) -> None:
    commands = addresses(dataclasses.replace(SLOT, guest_address=address)).splitlines()
    assert "addr replace 10.0.2.15/24 dev eth0" in commands
    assert "route replace default via 10.0.2.2 dev eth0" in commands


def test_a_mark_holds_for_the_same_bytes_only(tmp_path: Path) -> None:
    home, layer, link = Home(tmp_path / "home"), tmp_path / "layer", tmp_path / "link"
    layer.write_bytes(b"one")
    link.hardlink_to(layer)
    assert not gvisor_checked.is_checked(home, (layer,))
    gvisor_checked.remember(home, (layer,))
    layer.chmod(0o444)
    assert gvisor_checked.is_checked(home, (link,))
    assert not gvisor_checked.is_checked(home, (layer, link))
    os.utime(layer, ns=(1, 1))
    assert not gvisor_checked.is_checked(home, (layer,))


@pytest.mark.parametrize(
    ("reply", "understood"),
    [(b'{"success":true,"err":""}', True), (b'{"success":false,"err":"no"}', False), (b"[]", False), (b"", False)],
)
def test_a_surprise_on_the_control_socket_is_no_success(tmp_path: Path, reply: bytes, understood: bool) -> None:
    path = str(tmp_path / "s")
    assert not gvisor_sentry.call(path, "Pause")
    with kernel(path, "Pause", reply):
        assert gvisor_sentry.call(path, "Pause") is understood


@contextlib.contextmanager
def kernel(path: str, method: str, reply: bytes) -> Iterator[None]:
    """A sandbox's kernel that answers one call; what it is given to write into it does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(1)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                data, files, _, _ = socket.recv_fds(connection, 4096, 3)
                assert json.loads(data)["method"] == f"containerManager.{method}"
                for file in files:
                    os.write(file, b"saved")
                    os.close(file)
                connection.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


def test_a_checkpoint_is_written_by_the_kernel_or_told_why_not(tmp_path: Path) -> None:
    path, target = str(tmp_path / "s"), tmp_path / "image"
    target.mkdir()
    with kernel(path, "Checkpoint", b'{"success":true,"err":"","result":{}}'):
        assert gvisor_sentry.checkpoint(path, str(target)) == ""
    assert {file.name: file.read_bytes() for file in target.iterdir()} == dict.fromkeys(
        ("checkpoint.img", "pages_meta.img", "pages.img"), b"saved"
    )
    os.unlink(path)  # noqa: PTH108
    other = tmp_path / "other"
    other.mkdir()
    with kernel(path, "Checkpoint", b'{"success":false,"err":"a deleted file is open"}'):
        assert gvisor_sentry.checkpoint(path, str(other)) == "a deleted file is open"


@pytest.mark.parametrize("reply", [b"", b"[]", b"nonsense"])
def test_where_nothing_is_known_of_a_checkpoint_its_files_are_gone(tmp_path: Path, reply: bytes) -> None:
    path, target = str(tmp_path / "s"), tmp_path / "image"
    target.mkdir()
    with pytest.raises(gvisor_sentry.NoAnswerError):
        gvisor_sentry.checkpoint(path, str(target))
    with kernel(path, "Checkpoint", reply), pytest.raises(gvisor_sentry.NoAnswerError):
        gvisor_sentry.checkpoint(path, str(target))
    assert list(target.iterdir()) == []
