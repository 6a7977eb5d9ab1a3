"""Where everything lives under one home directory. docs/artifacts.md lists each path with its purpose."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

GUEST_VARIABLE = "AENV_GUEST_DIR"


@dataclass(frozen=True)
class Home:
    """One node's directory: ``$AENV_HOME``, /var/lib/aenv for root, or the user's XDG data directory."""

    root: Path

    @classmethod
    def default(cls) -> Home:
        """The home that commands use when none is given."""
        if configured := os.environ.get("AENV_HOME"):
            return cls(Path(configured).absolute())
        if os.geteuid() == 0:
            return cls(Path("/var/lib/aenv"))
        data = os.environ.get("XDG_DATA_HOME") or Path("~/.local/share").expanduser()
        return cls(Path(data) / "aenv")

    @property
    def repository(self) -> Path:
        """The committed repository (durable truth) when the store is ``posix_fs`` and no other is named."""
        return self.root / "repository"

    @property
    def cache(self) -> Path:
        """Blobs local to this node, rebuildable: hard links or copies of the repository's."""
        return self.root / "cache"

    @property
    def staging(self) -> Path:
        """Scratch of running builds; a directory per build, removed at its end."""
        return self.root / "staging"

    @property
    def sandboxes(self) -> Path:
        """A directory per sandbox, live or paused."""
        return self.root / "sandboxes"

    @property
    def locks(self) -> Path:
        """Lock files (flock) of this node."""
        return self.root / "locks"

    @property
    def pools(self) -> Path:
        """Which snapshots machines are kept ready of."""
        return self.root / "pools.json"

    @property
    def holder(self) -> Path:
        """The id of this home's lease in the repository, by which its sandboxes hold what they use."""
        return self.root / "holder"

    @property
    def network(self) -> Path:
        """A small file per network slot, so that the next node finds those of a node that was killed."""
        return self.root / "network"

    @property
    def secrets(self) -> Path:
        """The API key that ``aenv serve`` made, and the seed of its tokens; mode 0700."""
        return self.root / "secrets"

    @property
    def api(self) -> Path:
        """What ``aenv serve`` must know after a restart: outcomes of calls by their idempotency keys."""
        return self.root / "api"

    @property
    def template_builds(self) -> Path:
        """A directory per build of ``aenv serve``: its state, log and recipe."""
        return self.root / "template-builds"

    @property
    def template_files(self) -> Path:
        """Archives that clients of ``aenv serve`` have put for builds; bounded, the least used go first."""
        return self.root / "template-files"

    @property
    def node_socket(self) -> Path:
        """The unix socket on which the node process serves."""
        return self.root / "node.sock"

    @property
    def node_log(self) -> Path:
        """What the node process logs."""
        return self.root / "node.log"

    @property
    def block_socket(self) -> Path:
        """The unix socket on which the block server gives engines what is not local."""
        return self.root / "blocks.sock"

    @property
    def block_log(self) -> Path:
        """What the block server logs."""
        return self.root / "blocks.log"

    def guest(self) -> Path:
        """Guest kernel, modules and envd: ``$AENV_GUEST_DIR``, the home's own, or a checkout's build."""
        if configured := os.environ.get(GUEST_VARIABLE):
            return Path(configured).expanduser().absolute()
        own = self.root / "guest"
        checkout = Path(__file__).resolve().parent.parent / "build" / "guest"
        return own if own.exists() or not checkout.exists() else checkout
