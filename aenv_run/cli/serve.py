"""aenv serve."""

from __future__ import annotations

from pathlib import Path

import click

from aenv_run.api.settings import CONFIG_VARIABLE, Settings
from aenv_run.cli.signals import run_async

EPILOG = f"""\b
Examples:
  aenv serve
  aenv serve --port 9000 --max-sandboxes 50 --log-format json
  E2B_API_KEY=$(cat $AENV_HOME/secrets/api-key) E2B_API_URL=http://127.0.0.1:8000 python3 my_agent.py

Callers send the header X-API-Key. The key is $AENV_API_KEY, or made at the first start and kept in the file
secrets/api-key of AENV_HOME. Sandboxes run on when the server stops, unless --on-stop pause. {CONFIG_VARIABLE}
may name the file of --config. All settings: docs/server.md"""


@click.command(epilog=EPILOG)
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port to listen on; 0: any free one.  [default: 8000]")
@click.option("--config", type=click.Path(path_type=Path), help="Settings, as TOML.")
@click.option("--domain", "domains", multiple=True, help="Sandboxes are at {port}-{id}.DOMAIN too. Repeatable.")
@click.option("--max-sandboxes", type=int, help="With a machine at the same time; more are refused with 429.")
@click.option("--on-stop", type=click.Choice(["keep", "pause"]), help="Running sandboxes, when it stops.")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="Of standard error.")
def serve(config: Path | None, domains: tuple[str, ...], **options: object) -> None:
    """Serve the HTTP API that E2B's SDKs speak."""
    from aenv_run.api.serve import listen, log_to_stderr
    from aenv_run.api.serve import serve as run
    from aenv_run.api.server import open_server

    settings = Settings.read(config, domains=domains or None, **options)
    server = open_server(settings)
    listener = listen(settings)
    log_to_stderr(settings)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    click.echo(f"serving http://{shown}:{port}", err=True)
    if server.keys.generated is not None:
        click.echo(f"a new API key is in {server.keys.generated}", err=True)
    run_async(run(server, listener))
