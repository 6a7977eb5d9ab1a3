"""catalog keygen, sign, verify."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from aenv_run.catalog import Catalog
from aenv_run.cli.arguments import complete_reference, open_catalog
from aenv_run.cli.output import json_option, print_json, print_table
from aenv_run.digest import canonical_json
from aenv_run.errors import Conflict, InvalidInput, Unauthenticated, from_os
from aenv_run.minisign import MAX_TEXT_BYTES, SecretKey
from aenv_run.printable import printable
from aenv_run.signatures import VARIABLE, Trust, keep, required, sign, signatures_of
from aenv_run.types import Model, SnapshotId

PASSWORD_VARIABLE = "AENV_KEY_PASSWORD"
reference_argument = click.argument("reference", metavar="SNAPSHOT", shell_complete=complete_reference)
path_type = click.Path(path_type=Path)


class SignatureRow(Model):
    """One signature: ``valid`` is null where no key was given that could tell."""

    snapshot_id: SnapshotId
    key: str
    valid: bool | None
    comment: str = ""
    problem: str = ""


@click.command(epilog="\b\nExamples:\n  aenv catalog keygen ~/.config/aenv/ci\n  aenv catalog keygen ./ci -W")
@click.argument("file", type=path_type)
@click.option("-W", "--no-password", is_flag=True, help="Whoever reads the file can sign.")
@json_option
def keygen(file: Path, no_password: bool, as_json: bool) -> None:
    """Make a key: FILE signs and stays secret, FILE.pub is for those who verify. Both are minisign's.

    The password is asked for, or is that of $AENV_KEY_PASSWORD.
    """
    public = file.with_name(file.name + ".pub")
    key = SecretKey.new()
    password = None if no_password else _password(file, new=True)
    _create(file, key.text(password), 0o600)
    _create(public, key.public.text(), 0o644)
    if as_json:
        print_json({"key": key.public.name, "secret": str(file), "public": str(public)})
        return
    click.echo(key.public.name)
    click.echo(f"{file} signs; give {public} to those who verify", err=True)


@click.command(
    "sign",
    epilog="\b\nExamples:\n  aenv catalog sign swe-task:3 --key ci\n"
    "  aenv catalog sign swe-task:3 --signature manifest.minisig",
)
@reference_argument
@click.option("--key", type=path_type, help="The secret key, of `aenv catalog keygen` or minisign.")
@click.option("--signature", type=path_type, help="Instead: one that minisign made of the snapshot's manifest.")
@click.option("--comment", default="", help="A line that is signed along with it.")
@json_option
def sign_snapshot(reference: str, key: Path | None, signature: Path | None, comment: str, as_json: bool) -> None:
    """Vouch for a snapshot: sign its manifest, which names every byte of it. The signature is kept beside it."""
    if (key is None) == (signature is None):
        raise InvalidInput("say what to sign with", fix="give --key FILE, or --signature FILE")
    names = open_catalog()
    id, manifest = _manifest(names, reference)
    if signature is not None:
        made = keep(names.repository.store, id, _read(signature), str(signature), replace=True)
    else:
        assert key is not None
        made = sign(names.repository.store, id, manifest, _secret_key(key), comment)
    row = SignatureRow(snapshot_id=id, key=made.key_name, valid=None if signature else True, comment=made.comment)
    if as_json:
        print_json(row)
    else:
        click.echo(f"{id} {made.key_name}")


@click.command(
    epilog="\b\nExamples:\n  aenv catalog verify swe-task:3\n  aenv catalog verify swe-task:3 --key ci.pub"
)
@reference_argument
@click.option("--key", "keys", multiple=True, metavar="FILE.pub", help="Of this one. May be repeated.")
@json_option
def verify(reference: str, keys: tuple[str, ...], as_json: bool) -> None:
    """List the signatures of a snapshot. Fails unless a key given, or one of $AENV_REQUIRE_SIGNATURE, signed it.

    Without any key they are only listed.
    """
    names = open_catalog()
    id, manifest = _manifest(names, reference)
    trust = Trust.of_files(keys) if keys else required()
    rows = []
    for one in signatures_of(names.repository.store, id):
        known = [key for key in trust.keys if key.name == one.key_name] if trust else []
        valid = any(one.signature.is_of(key, manifest) for key in known) if one.signature and known else None
        comment = one.signature.comment if one.signature else ""
        rows.append(
            SignatureRow(snapshot_id=id, key=one.key_name, valid=valid, comment=comment, problem=one.problem)
        )
    if as_json:
        print_json(rows)
    else:
        words = {True: "valid", False: "WRONG", None: "not verified"}
        table = [[row.key, row.problem or words[row.valid], printable(row.comment)] for row in rows]
        print_table(["KEY", "SIGNATURE", "COMMENT"], table, empty="not signed (`aenv catalog sign`)")
    if trust is not None and trust.signer(names.repository.store, id, manifest) is None:
        raise trust.refuse(id)
    if trust is None and not as_json:
        click.echo(f"no key was given, so nothing was verified (--key, {VARIABLE})", err=True)


def _manifest(names: Catalog, reference: str) -> tuple[SnapshotId, bytes]:
    id = names.resolve(reference).snapshot_id
    return id, canonical_json(names.repository.snapshot(id))


def _secret_key(path: Path) -> SecretKey:
    text = _read(path).decode(errors="replace")
    try:
        return SecretKey.parse(text, os.environ.get(PASSWORD_VARIABLE), str(path))
    except Unauthenticated:
        if os.environ.get(PASSWORD_VARIABLE):
            raise
    return SecretKey.parse(text, _password(path, new=False), str(path))


def _password(path: Path, *, new: bool) -> str:
    given = os.environ.get(PASSWORD_VARIABLE)
    if given:
        return given
    if not sys.stdin.isatty():
        raise Unauthenticated(
            f"the password of {path} cannot be asked for here",
            fix=f"set {PASSWORD_VARIABLE}, or use a key without one (-W)",
        )
    asked: str = click.prompt(f"password of {path}", hide_input=True, confirmation_prompt=new, err=True)
    return asked


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise from_os(error, "cannot read a key or signature") from error


def _create(path: Path, text: str, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
    except FileExistsError:
        raise Conflict(f"{path} exists already", fix="give another name: no key can be made again") from None
    except OSError as error:
        raise from_os(error, "cannot write a key") from error
