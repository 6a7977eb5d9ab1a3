"""What a builder lends to its steps: settings, the files that carry them, and what a machine then reaches."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from aenv_build.language.load import load
from aenv_build.planning.keys import HostFacts
from aenv_build.planning.lent import APT_CONFIG, CERTIFICATES, FOLDER, Lent
from aenv_build.planning.plan import make_plan
from aenv_build.running.execute import build
from aenv_build.running.redact import Redactor
from aenv_build.running.staging_network import Reach, StagingNetwork
from aenv_run.errors import InvalidInput, RecipeError, Unsupported
from aenv_run.network.policy import NameVerdict, NetworkPolicy
from aenv_run.paths import Home
from aenv_run.types import Architecture, Digest
from tests.unit.node_site import make_site
from tests.unit.pretend_build import plan_of, workshop
from tests.unit.pretend_engine import Ran

FACTS = HostFacts(Architecture("amd64"), Digest("sha256:" + "0" * 64))
PEM = "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"


def test_nothing_is_lent_by_default() -> None:
    assert Lent.read({}) == Lent() and Lent().environment == {} and not Lent().serves("pip")


def test_settings_become_what_programs_know(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text(PEM)
    lent = Lent.read(
        {
            "AENV_BUILD_PROXY": "http://me:pa%24s@proxy.example:3128",
            "AENV_BUILD_CA_BUNDLE": str(tmp_path / "ca.pem"),
            "AENV_BUILD_PIP_INDEX": "http://index.example:3141/root/pypi",
            "AENV_BUILD_APT_MIRROR": "http://deb.example/debian http://deb.example/debian-security",
            "AENV_BUILD_NPM_REGISTRY": "https://npm.example/",
        }
    )
    env = lent.environment
    assert env["https_proxy"] == env["HTTP_PROXY"] == "http://me:pa%24s@proxy.example:3128"
    assert env["SSL_CERT_FILE"] == env["PIP_CERT"] == env["GIT_SSL_CAINFO"] == CERTIFICATES
    assert env["PIP_INDEX_URL"] == "http://index.example:3141/root/pypi"
    assert env["PIP_TRUSTED_HOST"] == "index.example"
    assert env["npm_config_registry"] == "https://npm.example/" and env["APT_CONFIG"] == APT_CONFIG
    assert lent.hosts == ("proxy.example", "index.example", "deb.example", "npm.example")
    assert lent.hosts_for("pip") == ("index.example",) and lent.hosts_for("run") == ()
    assert lent.serves("pip") and lent.serves("apt") and not lent.serves("run")
    assert lent.passwords == ("pa%24s", "pa$s")
    assert Redactor(lent.passwords).text("to http://me:pa%24s@proxy.example") == "to http://me:***@proxy.example"


def test_a_password_is_not_for_a_machine_whose_memory_is_captured() -> None:
    lent = Lent(proxy="http://me:word@p.example", pip_index="http://i.example", certificates=b"PEM")
    assert lent.without_passwords() == Lent(pip_index="http://i.example", certificates=b"PEM")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PROXY", "proxy:3128"),
        ("PROXY", "http://"),
        ("PIP_INDEX", "ftp://index.example"),
        ("PIP_INDEX", "http://index.example/a b"),
        ("APT_MIRROR", "http://deb.example"),
        ("CA_BUNDLE", "/nonexistent/ca.pem"),
        ("CA_BUNDLE", os.devnull),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidInput, match=f"AENV_BUILD_{name}"):
        Lent.read({f"AENV_BUILD_{name}": value})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("deb http://deb.example/debian bookworm main", "deb http://m.example:8/a&b/debian bookworm main"),
        ("URIs: https://x.example/y/debian/", "URIs: http://m.example:8/a&b/debian"),
        ("deb http://deb.example/debian-security s main", "deb http://deb.example/debian-security s main"),
    ],
)
def test_a_mirror_takes_the_place_of_what_ends_as_it_does(source: str, expected: str) -> None:
    lent = Lent.read({"AENV_BUILD_APT_MIRROR": "http://m.example:8/a&b/debian"})
    (expression,) = lent.source_changes
    done = subprocess.run(["sed", "-E", expression], input=source, capture_output=True, text=True, check=True)
    assert done.stdout == expected


def test_what_is_lent_is_in_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.tar").write_bytes(b"archive")
    (tmp_path / "r.yaml").write_text(
        "version: 1\nname: n\nbase: {archive: a.tar}\nmachine: {internet: true}\nsteps: [{pip: [six]}, {run: x}]\n"
    )
    plain = make_plan(load(tmp_path / "r.yaml"), FACTS)
    monkeypatch.setenv("AENV_BUILD_PIP_INDEX", "http://index.example/simple")
    lent = make_plan(load(tmp_path / "r.yaml"), FACTS)
    assert [stage.key for stage in lent.stages.values()] == [stage.key for stage in plain.stages.values()]


async def test_what_a_machine_reaches(tmp_path: Path) -> None:
    network = StagingNetwork(Home(tmp_path))
    assert await network.policy(Reach(internet=True)) == NetworkPolicy(internet=True)
    assert await network.policy(Reach(internet=True, hosts=("192.0.2.9",))) == NetworkPolicy(internet=True)
    private = await network.policy(Reach(internet=True, hosts=("10.1.2.3",)))
    assert private == NetworkPolicy(internet=True, allow=("0.0.0.0/0", "10.1.2.3"))
    assert private.judge("deb.example") is NameVerdict.RESOLVE
    alone = await network.policy(Reach(hosts=("10.1.2.3",)))
    assert alone == NetworkPolicy(internet=False, allow=("10.1.2.3",))
    assert alone.judge("deb.example") is NameVerdict.REFUSE
    with pytest.raises(InvalidInput, match="this host itself"):
        await network.policy(Reach(hosts=("127.0.0.1",)))


def test_a_lent_index_serves_a_recipe_without_internet(tmp_path: Path) -> None:
    from aenv_build.planning.graph import check_network

    (tmp_path / "r.yaml").write_text("version: 1\nname: n\nbase: {archive: a.tar}\nsteps: [{pip: [six]}]\n")
    source = load(tmp_path / "r.yaml")
    check_network(source, Lent(pip_index="http://index.example"))
    with pytest.raises(RecipeError, match=r"r.yaml:4:10: pip fetches packages"):
        check_network(source, Lent(apt_mirrors=("http://deb.example/debian",)))


async def test_a_machine_that_may_reach_some_hosts_alone_needs_a_slot(tmp_path: Path) -> None:
    """Without one nothing would hold it to them: the build is refused, not opened."""
    site = make_site(tmp_path / "home", tmp_path / "seed")
    (tmp_path / "r.yaml").write_text("version: 1\nname: n\nbase: {snapshot: tiny}\nsteps: [{pip: [six]}]\n")
    shop = replace(workshop(site), lent=Lent(pip_index="http://10.1.2.3/simple"))
    with pytest.raises(Unsupported, match=r"may reach 10\.1\.2\.3 alone"):
        await build(plan_of(site, tmp_path / "r.yaml"), shop)


async def test_files_are_there_for_the_time_of_the_step(tmp_path: Path) -> None:
    site = make_site(tmp_path / "home", tmp_path / "seed")
    (tmp_path / "r.yaml").write_text(
        "version: 1\nname: n\nbase: {snapshot: tiny}\nmachine: {internet: true}\n"
        "steps: [{run: fetch}, {start: serve}]\n"
    )
    ran: list[Ran] = []

    def output(one: Ran) -> list[tuple[str, bytes]]:
        ran.append(one)
        return []

    site.engine.output = output
    lent = Lent(certificates=b"PEM", apt_mirrors=("http://deb.example/debian",))
    await build(plan_of(site, tmp_path / "r.yaml"), replace(workshop(site), lent=lent))
    assert [path for path, _ in site.engine.put] == [CERTIFICATES, APT_CONFIG]
    assert site.engine.removed == [FOLDER]
    env = {one.command: one.env for one in ran}
    assert env["fetch"]["APT_CONFIG"] == APT_CONFIG and "APT_CONFIG" not in env["serve"]
