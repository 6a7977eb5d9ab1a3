"""Holding back new connections into a sandbox on a network slot while its memory is saved.

One that is accepted between the daemon's disconnect and the checkpoint is in the image, and the restored daemon
may never answer (measured: 1 in 20 images, with two clients that connect without pause). Established connections
are left alone. Standard library only.
"""

from __future__ import annotations

import time

from aenv_run.drivers.gvisor_children import Children

NFT_TIMEOUT_S = 30.0
#: A handshake that was let in just before has become a connection by then, which the daemon knows and closes.
SETTLE_S = 0.01


class GateError(Exception):
    """The gate's rules could not be loaded; the text says why."""


class Gate:
    """Rules in the slot's router. What is dropped comes again by itself a second later."""

    def __init__(self, children: Children, router_netns: str, guest_address: str) -> None:
        self._children, self._router_netns, self._guest_address = children, router_netns, guest_address

    @property
    def _table(self) -> str:
        return f"inet aenv_gate_{self._guest_address.replace('.', '_')}"

    def close(self) -> None:
        """No new connection gets in. Idempotent."""
        drop = f"ip daddr {self._guest_address} tcp flags & (syn | ack) == syn drop"
        chains = "".join(
            f"chain {hook} {{ type filter hook {hook} priority -10; {drop}; }}\n" for hook in ("forward", "output")
        )
        self._load(f"table {self._table}\ndelete table {self._table}\ntable {self._table} {{\n{chains}}}\n")
        time.sleep(SETTLE_S)

    def open(self) -> None:
        """Let them in again. Idempotent."""
        self._load(f"table {self._table}\ndelete table {self._table}\n")

    def _load(self, rules: str) -> None:
        argv = ["nsenter", f"--net={self._router_netns}", "nft", "-f", "-"]
        code, said = self._children.run(argv, timeout_s=NFT_TIMEOUT_S, text=rules)
        if code != 0:
            raise GateError(f"connections into the sandbox cannot be held back: {said[-500:]}")
