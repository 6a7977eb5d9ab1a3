"""Signatures: minisign's own program and ours read each other; what no required key signed is not used."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from aenv_build.commands.prepare import Preparation
from aenv_build.language.load import load
from aenv_build.planning.lock import Lock
from aenv_run.catalog import Catalog
from aenv_run.catalog.export import export
from aenv_run.catalog.intake import take_in
from aenv_run.check import check
from aenv_run.cli.command import run
from aenv_run.digest import canonical_json
from aenv_run.errors import AenvError, CorruptData, InvalidInput, Unauthenticated, Untrusted
from aenv_run.minisign import MAX_TEXT_BYTES, PublicKey, SecretKey, Signature
from aenv_run.node_wire import CreateRequest, PoolRequest
from aenv_run.paths import Home
from aenv_run.repository import Repository
from aenv_run.signatures import (
    MAX_SIGNATURES,
    Trust,
    keep,
    require_signed,
    required,
    sign,
    signature_key,
    signatures_of,
)
from aenv_run.store.memory import MemoryStore
from aenv_run.store.posix import PosixStore
from aenv_run.types import Name, SnapshotId
from tests.bytes_half import commit
from tests.unit.build_site import HEAD, BuildSite
from tests.unit.node_site import Site, launch

DATA = b'{"a":1}'


def minisign(*argv: str, typed: str = "") -> str:
    """Debian's program, as somebody else's word for the format."""
    program = shutil.which("minisign")
    assert program, "the tests need minisign: apt install minisign"
    done = subprocess.run([program, *argv], input=typed, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# The format


@pytest.mark.parametrize("legacy", [False, True])
def test_what_minisign_signs_is_verified(tmp_path: Path, legacy: bool) -> None:
    secret, public, data = tmp_path / "key", tmp_path / "key.pub", tmp_path / "data"
    data.write_bytes(DATA)
    minisign("-G", "-W", "-p", str(public), "-s", str(secret))
    minisign("-S", *(["-l"] if legacy else []), "-W", "-s", str(secret), "-m", str(data), "-t", "by hand")
    key = PublicKey.parse(public.read_text(), "key.pub")
    found = Signature.parse((tmp_path / "data.minisig").read_bytes(), "data.minisig")
    assert found.is_of(key, DATA) and found.comment == "by hand" and found.key_name == key.name
    assert key.name.lstrip("0") in public.read_text()
    assert not found.is_of(key, DATA + b" ") and not found.is_of(SecretKey.new().public, DATA)
    assert SecretKey.parse(secret.read_text(), None, "key").public == key


@pytest.mark.parametrize("password", [None, "correct horse"])
def test_minisign_verifies_and_uses_ours(tmp_path: Path, password: str | None) -> None:
    key, data = SecretKey.new(), tmp_path / "data"
    data.write_bytes(DATA)
    text = key.text(password)
    (tmp_path / "k").write_text(text)
    (tmp_path / "k.pub").write_text(key.public.text())
    (tmp_path / "data.minisig").write_text(key.sign(DATA, "aenv snapshot x"))
    check_it = ("-V", "-p", str(tmp_path / "k.pub"), "-m", str(data))
    assert "Trusted comment: aenv snapshot x" in minisign(*check_it)
    typed = f"{password}\n" if password else ""
    minisign("-S", *([] if password else ["-W"]), "-s", str(tmp_path / "k"), "-m", str(data), typed=typed)
    minisign(*check_it)
    assert SecretKey.parse(text, password, "k") == key
    assert "seed" not in repr(key)
    if password:
        for wrong in (None, "battery staple"):
            with pytest.raises(Unauthenticated):
                SecretKey.parse(text, wrong, "k")


def test_what_is_altered_is_no_signature(tmp_path: Path) -> None:
    key = SecretKey.new()
    text = key.sign(DATA, "snapshot x")
    assert Signature.parse(text.encode(), "it").is_of(key.public, DATA)
    assert not Signature.parse(text.replace("snapshot x", "snapshot y").encode(), "it").is_of(key.public, DATA)
    lines = text.split("\n")
    for bad in (
        "", text[:-20], "\n".join([lines[0], lines[1][:-4], *lines[2:]]), text + "more\n", text.replace("R", "*"),
        "x" + text, text.replace("snapshot x", "z" * 9000), "a" * (MAX_TEXT_BYTES + 1), "\ud800",
    ):  # fmt: skip
        with pytest.raises(CorruptData, match="it is no signature"):
            Signature.parse(bad.encode(errors="surrogatepass"), "it")
    for bad in ("", "x\ny\nz\n", key.text(None), "untrusted comment: x\nRWQ\n"):
        with pytest.raises(InvalidInput, match="no public key"):
            PublicKey.parse(bad, "it")
    greedy = bytearray(158)
    greedy[:6], greedy[38:54] = b"EdScB2", b"\xff" * 16
    for bad in ("", key.public.text(), f"untrusted comment: x\n{base64.b64encode(greedy).decode()}\n"):
        with pytest.raises(InvalidInput):
            SecretKey.parse(bad, "pw", "it")
    with pytest.raises(InvalidInput, match="one line"):
        key.sign(DATA, "two\nlines")


# In a repository


def signed(tmp_path: Path) -> tuple[Repository, SnapshotId, bytes, SecretKey]:
    repository = Repository(MemoryStore())
    snapshot = commit(repository, tmp_path, b"disk")
    key = SecretKey.new()
    sign(repository.store, snapshot.id, canonical_json(snapshot), key)
    return repository, snapshot.id, canonical_json(snapshot), key


def test_only_a_required_key_that_signed_this_snapshot_counts(tmp_path: Path) -> None:
    repository, id, manifest, key = signed(tmp_path)
    other = commit(repository, tmp_path, b"other")
    require_signed(repository, id)
    repository.trust = Trust((SecretKey.new().public, key.public))
    require_signed(repository, id)
    # Another snapshot's signature in its place, and none at all.
    keep(repository.store, other.id, next(signatures_of(repository.store, id)).data, "moved")
    with pytest.raises(Untrusted, match=key.public.name) as caught:
        require_signed(repository, other.id)
    assert other.id in caught.value.message and caught.value.fix
    # What the caller asks for counts beside what the repository was opened with, and so does a key of the same id.
    stranger = PublicKey(key.public.id, SecretKey.new().public.key)
    for asked in (SecretKey.new().public, stranger):
        with pytest.raises(Untrusted):
            require_signed(repository, id, Trust((asked,)))
    for damaged in (b"", b"junk", b"x" * (MAX_TEXT_BYTES + 1)):
        repository.store.damage(signature_key(id, key.public.name), damaged)  # type: ignore[attr-defined]
        with pytest.raises(Untrusted):
            require_signed(repository, id)
        assert [problem.kind for problem in check(repository).problems] == ["unreadable_signature"]
        assert sign(repository.store, id, manifest, key).is_of(key.public, manifest)
        require_signed(repository, id)
    report = check(repository)
    assert report.ok and report.counts["signatures"] == 2


def test_a_store_full_of_signatures_is_read_no_further(tmp_path: Path) -> None:
    repository, id, manifest, _ = signed(tmp_path)
    for _ in range(MAX_SIGNATURES):
        sign(repository.store, id, manifest, SecretKey.new())
    assert len(list(signatures_of(repository.store, id))) == MAX_SIGNATURES


def test_keys_are_files_and_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [SecretKey.new().public for _ in range(3)]
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "a.pub").write_text(keys[0].text())
    (tmp_path / "some" / "b.pub").write_text(keys[1].text())
    (tmp_path / "some" / "readme").write_text("no key")
    (tmp_path / "c").write_text(keys[2].text().splitlines()[1])
    assert Trust.of_files([str(tmp_path / "some"), str(tmp_path / "c")]).keys == tuple(keys)
    (tmp_path / "none").mkdir()
    for wrong in (tmp_path / "none", tmp_path / "absent", tmp_path / "some" / "readme"):
        with pytest.raises(AenvError):
            Trust.of_files([str(wrong)])


async def test_a_node_launches_only_what_is_signed(site: Site) -> None:
    repository = site.tools.repository
    snapshot = repository.snapshot(site.tools.catalog.resolve("tiny").snapshot_id)
    key, node = SecretKey.new(), site.node()
    text = (key.public.text(),)
    with pytest.raises(Untrusted, match=snapshot.id):
        await launch(node, signed_by=text)
    with pytest.raises(Untrusted):
        await node.set_pool(PoolRequest(snapshot="tiny", signed_by=text))
    repository.trust = Trust((key.public,))
    with pytest.raises(Untrusted):
        await launch(node)
    assert not (site.home.cache / "blobs").exists(), "nothing of it was used"
    sign(repository.store, snapshot.id, canonical_json(snapshot), key)
    sandbox = await launch(node, signed_by=text)
    with pytest.raises(InvalidInput):
        await node.create(CreateRequest(snapshot="tiny", signed_by=("junk",)))
    await node.kill(sandbox)
    assert site.clean()


async def test_a_build_begins_only_with_what_is_signed_and_believes_no_unsigned_results(tmp_path: Path) -> None:
    made = BuildSite.make(tmp_path)
    recipe = HEAD + "steps:\n  - {id: a, run: a}\noutputs: [{from: a}]\n"
    await made.build(recipe)
    assert made.commands == ["a"]
    key = SecretKey.new()
    made.repository.trust = Trust((key.public,))
    made.repository.own.clear()  # as another process
    (tmp_path / "recipe.yaml").write_text(recipe)
    preparation = Preparation(made.home, made.repository, Lock())
    with pytest.raises(Untrusted, match=r"recipe\.yaml:3"):
        await preparation.base_snapshot(load(tmp_path / "recipe.yaml"))
    base = made.repository.snapshot(made.site.tools.catalog.resolve("tiny").snapshot_id)
    sign(made.repository.store, base.id, canonical_json(base), key)
    assert await preparation.base_snapshot(load(tmp_path / "recipe.yaml")) == base
    await made.build(recipe)
    assert made.commands == ["a", "a"], "the result of an unknown builder is no result"
    await made.build(recipe)
    assert made.commands == ["a", "a"], "its own is"


def test_an_export_carries_signatures_and_an_import_requires_them(tmp_path: Path) -> None:
    one, id, _, key = signed(tmp_path)
    catalog = Catalog(one)
    catalog.publish(Name("task"), id)
    export(catalog, "task", tmp_path / "layout")
    two = Catalog(Repository(PosixStore(tmp_path / "two")))
    two.repository.trust = Trust((SecretKey.new().public,))
    (tmp_path / "scratch").mkdir()
    with pytest.raises(Untrusted, match=id):
        take_in(two, tmp_path / "layout", tmp_path / "scratch")
    assert list(two.repository.store.list("")) == []
    two.repository.trust = Trust((key.public,))
    two.repository.store.put_new(signature_key(id, key.public.name), SecretKey.new().sign(b"", "x").encode())
    assert take_in(two, tmp_path / "layout", tmp_path / "scratch").snapshot_id == id
    require_signed(two.repository, id)
    assert check(two.repository, deep=True).ok
    export(two, "task", tmp_path / "again")
    assert (tmp_path / "again" / "index.json").read_bytes() == (tmp_path / "layout" / "index.json").read_bytes()


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AENV_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    repository = Repository(PosixStore(Home(tmp_path / "home").repository))
    snapshot = commit(repository, tmp_path, b"disk")

    def said(*argv: str, code: int = 0) -> str:
        assert run(["catalog", *argv]) == code
        return capsys.readouterr().out

    told = json.loads(said("keygen", "ci", "-W", "--json"))
    assert (tmp_path / "ci").stat().st_mode & 0o777 == 0o600 and len(told["key"]) == 16
    said("keygen", "ci", "-W", code=65)
    said("keygen", "with-password", code=77)  # there is no terminal to ask on
    monkeypatch.setenv("AENV_KEY_PASSWORD", "pw")
    said("keygen", "with-password")
    assert json.loads(said("verify", snapshot.id, "--json")) == []
    said("verify", snapshot.id, "--key", "ci.pub", code=77)
    assert told["key"] in said("sign", snapshot.id, "--key", "ci", "--comment", "by CI")
    said("sign", snapshot.id[:12], "--key", "with-password")
    monkeypatch.setenv("AENV_KEY_PASSWORD", "other")
    said("sign", snapshot.id, "--key", "with-password", code=77)
    said("sign", snapshot.id, code=64)
    said("sign", snapshot.id, "--key", "absent", code=66)
    rows = json.loads(said("verify", snapshot.id, "--key", "ci.pub", "--json"))
    assert sorted((row["valid"], row["comment"]) for row in rows if row["key"] == told["key"]) == [
        (True, f"aenv snapshot {snapshot.id} by CI")
    ]
    # One that minisign itself made of the manifest.
    (tmp_path / "manifest").write_bytes(canonical_json(snapshot))
    minisign("-G", "-W", "-p", "hand.pub", "-s", "hand")
    minisign("-S", "-W", "-s", "hand", "-m", "manifest")
    said("sign", snapshot.id, "--signature", "manifest.minisig")
    assert "valid" in said("verify", snapshot.id, "--key", "hand.pub")
    assert check(repository).counts["signatures"] == 3
    said("export", snapshot.id, "layout")
    monkeypatch.setenv("AENV_HOME", str(tmp_path / "two"))
    (tmp_path / "other.pub").write_text(SecretKey.new().public.text())
    said("import", "layout", "--require-signature", "other.pub", code=77)
    assert "AENV_REQUIRE_SIGNATURE" not in os.environ
    said("import", "layout", "--require-signature", "other.pub", "--require-signature", "hand.pub")


@pytest.mark.parametrize("value", [":", "a.pub:", ":a.pub"])
def test_an_empty_name_among_required_keys_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("AENV_REQUIRE_SIGNATURE", value)
    with pytest.raises(InvalidInput, match="empty name"):
        required()
    monkeypatch.setenv("AENV_REQUIRE_SIGNATURE", "")
    assert required() is None
