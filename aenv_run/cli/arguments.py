"""What several commands need: opening a sandbox, completing ids, parsing NAME=VALUE."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.globals import push_context
from click.shell_completion import CompletionItem

from aenv_run.errors import AenvError, InvalidInput
from aenv_run.paths import Home

if TYPE_CHECKING:
    from aenv_run.catalog import Catalog
    from aenv_run.credentials import ServerAddress
    from aenv_run.network.forward import PublishedPort
    from aenv_run.node_client import NodeClient
    from aenv_run.repository import Repository
    from aenv_run.sdk_async import AsyncSandbox

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
#: A shell that waits longer for its user's TAB is in the way.
COMPLETION_S = 2.0


async def open_sandbox(sandbox_id: str) -> AsyncSandbox:
    """The sandbox as it is: a paused one stays paused (and then refuses commands)."""
    from aenv_run.sdk_async import AsyncSandbox

    node = node_client()
    return AsyncSandbox(await node.get(sandbox_id), node)


def server(context: click.Context | None = None) -> ServerAddress | None:
    """The server that this command is for; None: this machine."""
    from aenv_run.credentials import chosen_server

    found = context or click.get_current_context(silent=True)
    return chosen_server(local=bool(found and found.find_root().params.get("local")))


def node_client() -> NodeClient:
    """Of this machine's node, or of the server's."""
    from aenv_run.node_client import NodeClient

    return NodeClient(server=server())


def the_repository() -> Repository:
    """The one that the environment names, or the server's."""
    from aenv_run.config import open_repository, server_repository

    found = server()
    return open_repository(None, Home.default()) if found is None else server_repository(found)


def open_catalog() -> Catalog:
    """Of ``the_repository``."""
    from aenv_run.catalog import Catalog

    return Catalog(the_repository())


def pairs(values: Sequence[str], what: str) -> dict[str, str]:
    """``("A=1", "B=2")`` as a dictionary."""
    result: dict[str, str] = {}
    for value in values:
        name, separator, rest = value.partition("=")
        if not separator or not name:
            raise InvalidInput(f"{what} {value!r} is not NAME=VALUE")
        result[name] = rest
    return result


def published_port(text: str) -> PublishedPort:
    """``unix:PATH:PORT``."""
    from aenv_run.network.forward import PublishedPort

    kind, _, rest = text.partition(":")
    path, _, port = rest.rpartition(":")
    if kind != "unix" or not path or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidInput(f"{text!r} cannot be published", fix="write unix:PATH:PORT")
    return PublishedPort(path=Path(path).absolute(), port=int(port))


def _candidates(find: Callable[[click.Context], Iterable[str]]) -> Completer:
    """What ``find`` gives that begins as what is typed; nothing, in silence, when it fails or takes too long."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found: list[str] = []

        def work() -> None:
            push_context(context)  # of this thread
            with suppress(AenvError, OSError, ValueError):
                found.extend(find(context))

        thread = threading.Thread(target=work, daemon=True)  # one that hangs does not keep the shell
        thread.start()
        thread.join(COMPLETION_S)
        return [CompletionItem(one) for one in tuple(found) if one.startswith(incomplete)]

    return complete


def _sandbox_ids(context: click.Context) -> list[str]:
    """Those on disk, without asking a node; or the server's."""
    if server(context) is not None:
        return [str(info.sandbox_id) for info in asyncio.run(node_client().list())]
    directory = Home.default().sandboxes
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def _references(context: click.Context) -> list[str]:
    entries = open_catalog().entries()
    return sorted({entry.reference for entry in entries} | {f"{e.name}:{tag}" for e in entries for tag in e.tags})


def _tags(context: click.Context) -> list[str]:
    """Of the name that was given before."""
    from aenv_run.types import Name

    name = context.params.get("name")
    return [str(tag) for tag in open_catalog().tags(Name(name))] if name else []


complete_sandbox = _candidates(_sandbox_ids)
#: ``name:version`` of the catalog.
complete_snapshot = _candidates(lambda context: [entry.reference for entry in open_catalog().entries()])
complete_name = _candidates(lambda context: [str(name) for name in open_catalog().names()])
#: ``name:version`` and ``name:tag``.
complete_reference = _candidates(_references)
complete_tag = _candidates(_tags)


def _require(context: click.Context, parameter: click.Parameter, keys: tuple[str, ...]) -> None:
    """For this command as if the variable named them, so that all that it does and starts keeps to it."""
    name = "AENV_REQUIRE_SIGNATURE"
    if not keys:
        return
    if not all(keys):
        raise click.BadParameter("the name of a key is empty", context, parameter)
    before = os.environ.get(name)

    def restore() -> None:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before

    os.environ[name] = os.pathsep.join(keys)
    context.call_on_close(restore)


require_signature_option = click.option(
    "--require-signature", multiple=True, metavar="KEY.pub", expose_value=False, callback=_require,
    help="Use only what such a key signed: a file, or a directory of some.  [default: $AENV_REQUIRE_SIGNATURE]",
)  # fmt: skip


sandbox_argument = click.argument("sandbox_id", metavar="ID", shell_complete=complete_sandbox)


def parse_duration(text: str) -> float:
    """Seconds from ``300``, ``90s``, ``5m``, ``2h``."""
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1)
    try:
        seconds = float(number) * unit
    except ValueError:
        raise InvalidInput(f"{text!r} is no duration", fix="write seconds, or 90s, 5m, 2h") from None
    if not 0 < seconds <= 86400:
        raise InvalidInput(f"a time of {text} is not possible", fix="give more than 0 and at most 24h")
    return seconds


def parse_age(text: str) -> float:
    """Seconds from ``90s``, ``5m``, ``12h``, ``30d``."""
    found = re.fullmatch(r"([0-9]{1,6})([smhd])", text)
    if not found:
        raise InvalidInput(f"{text!r} is no age", fix="write 90s, 5m, 12h or 30d")
    return int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def parse_size(text: str) -> int:
    """Bytes from ``4096``, ``512MiB``, ``4GiB``."""
    found = re.fullmatch(r"([0-9]{1,15})(KiB|MiB|GiB|TiB)?", text)
    if not found or int(found[1]) == 0:
        raise InvalidInput(f"{text!r} is no size", fix="write a whole number of bytes, or 512MiB, 4GiB")
    return int(found[1]) << {None: 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}[found[2]]
