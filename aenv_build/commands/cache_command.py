"""``aenv-build cache``."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click

from aenv_build.cache.cache_mounts import MountStore, mount_limit_bytes
from aenv_build.reports.wording import size
from aenv_run.paths import Home
from aenv_run.printable import printable


@click.command(
    epilog="\b\nExamples:\n  aenv-build cache\n  aenv-build cache --clear",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("--clear", is_flag=True, help="Remove all of it. Builds then fetch again.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--home", "home_path", type=click.Path(path_type=Path), help="Default: $AENV_HOME.")
def cache(clear: bool, as_json: bool, home_path: Path | None) -> None:
    """Show the directories that steps keep between builds (the step key 'cache'), or remove them."""
    home = Home(home_path.absolute()) if home_path else Home.default()
    store = MountStore(home.cache / "mounts", mount_limit_bytes())
    if clear:
        freed = store.empty()
        click.echo(json.dumps({"freed_bytes": freed}) if as_json else f"removed {size(freed)}")
        return
    kept = store.show()
    if as_json:
        click.echo(json.dumps({"mounts": [asdict(one) for one in kept], "limit_bytes": mount_limit_bytes()}))
        return
    for one in kept:
        used = datetime.fromtimestamp(one.used_at_s, UTC).strftime("%Y-%m-%d %H:%M")
        click.echo(f"{size(one.size_bytes):>10}  {used}  {printable(one.scope)}  {printable(one.path)}")
    click.echo(f"{size(sum(one.size_bytes for one in kept))} of at most {size(mount_limit_bytes())}")
