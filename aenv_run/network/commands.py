"""ip(8) and nft(8) through the one spawner. In batches: measured faster than netlink from Python."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from aenv_run.process import Completed, check, run

TIMEOUT_S = 30.0
PACKAGES = "install iproute2, nftables and util-linux (scripts/setup does), then run `aenv doctor`"


def _within(namespace: Path | None, argv: tuple[str, ...]) -> tuple[str, ...]:
    # nsenter rather than `ip -n`, which also makes a mount namespace and mounts sysfs.
    return argv if namespace is None else ("nsenter", f"--net={namespace}", "--", *argv)


async def ip_batch(lines: Iterable[str], *, what: str, namespace: Path | None = None) -> None:
    """Run ip commands, in order, in one process; the first that fails is an error."""
    text = "".join(f"{line}\n" for line in lines).encode()
    argv = _within(namespace, ("ip", "-batch", "-"))
    await check(argv, what=what, fix=PACKAGES, timeout_s=TIMEOUT_S, stdin=text)


async def ip_force(lines: Iterable[str]) -> Completed:
    """Run ip commands in one process, each whatever became of those before."""
    text = "".join(f"{line}\n" for line in lines).encode()
    return await run(("ip", "-force", "-batch", "-"), timeout_s=TIMEOUT_S, stdin=text)


async def ip_json(*arguments: str) -> bytes:
    """What ``ip -json ...`` prints."""
    done = await check(
        ("ip", "-json", *arguments), what="reading the host's network", fix=PACKAGES, timeout_s=TIMEOUT_S
    )
    return done.stdout.strip() or b"[]"


async def nft(text: str, *, what: str, namespace: Path | None = None) -> None:
    """Load rules as one transaction: all or nothing."""
    argv = _within(namespace, ("nft", "-f", "-"))
    await check(argv, what=what, fix=PACKAGES, timeout_s=TIMEOUT_S, stdin=text.encode())
