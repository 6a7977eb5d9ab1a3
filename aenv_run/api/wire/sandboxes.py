"""Bodies of the sandbox endpoints: what is told about one."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from aenv_run.api.server import Server
from aenv_run.api.wire.model import Told, at
from aenv_run.lifecycle import State
from aenv_run.network import NetworkPolicy
from aenv_run.node_wire import SandboxInfo

#: Of the daemon in every sandbox; SDKs choose by it what they may use.
ENVD_VERSION = "0.6.4"
ShownState = Literal["running", "paused"]
#: What callers see of the states that pass; a dead one is shown to nobody.
SHOWN: dict[State, ShownState] = {
    State.STARTING: "running",
    State.RUNNING: "running",
    State.RESUMING: "running",
    State.PAUSING: "paused",
    State.PAUSED: "paused",
    State.SNAPSHOTTING: "paused",
    State.FORKING: "paused",
}


class Sandbox(Told):
    """What a caller needs to use a sandbox that he was just given."""

    template_id: str
    sandbox_id: str
    client_id: str = ""
    envd_version: str = ENVD_VERSION
    alias: str | None = None
    envd_access_token: str | None = None
    traffic_access_token: str | None = None
    domain: str | None = None

    @classmethod
    def of(cls, info: SandboxInfo, server: Server) -> Sandbox:
        """Of one that runs."""
        return cls(
            template_id=template_of(info),
            sandbox_id=info.sandbox_id,
            alias=info.terms.alias,
            envd_access_token=info.access_token if info.terms.secure else None,
            traffic_access_token=None if info.terms.public_ports else server.keys.traffic_token(info.sandbox_id),
            domain=server.settings.domain,
        )


class Network(Told):
    """What a sandbox may reach, and who may reach it."""

    allow_public_traffic: bool
    allow_out: tuple[str, ...]
    deny_out: tuple[str, ...]
    mask_request_host: str | None = None

    @classmethod
    def of(cls, info: SandboxInfo) -> Network:
        """Its policy and terms."""
        return cls(
            allow_public_traffic=info.terms.public_ports,
            allow_out=info.network.allow,
            deny_out=_denied(info.network),
            mask_request_host=info.terms.mask_host,
        )


def _denied(policy: NetworkPolicy) -> tuple[str, ...]:
    return policy.deny if policy.internet or not policy.allow else ("0.0.0.0/0", *policy.deny)


class Lifecycle(Told):
    """What becomes of it when its time is over, and when somebody calls it after that."""

    auto_resume: bool
    on_timeout: Literal["kill", "pause"]


class ListedSandbox(Told):
    """A row of the list."""

    template_id: str
    sandbox_id: str
    client_id: str = ""
    started_at: datetime
    end_at: datetime
    cpu_count: int
    memory_mb: int
    disk_size_mb: int
    state: ShownState
    envd_version: str = ENVD_VERSION
    alias: str | None = None
    metadata: dict[str, str]

    @classmethod
    def of(cls, info: SandboxInfo) -> ListedSandbox:
        """One row."""
        return cls.model_validate(_row(info))


class SandboxDetail(ListedSandbox):
    """All that is told about one."""

    envd_access_token: str | None = None
    allow_internet_access: bool
    domain: str | None = None
    network: Network
    lifecycle: Lifecycle
    pause_mode: Literal["full", "filesystem"] | None = Field(None, description="only of one that is paused")

    @classmethod
    def detail_of(cls, info: SandboxInfo, server: Server) -> SandboxDetail:
        """Of one sandbox."""
        paused = info.state is State.PAUSED
        return cls.model_validate(
            {
                **_row(info),
                "envd_access_token": info.access_token if info.terms.secure else None,
                "allow_internet_access": info.network.internet,
                "domain": server.settings.domain,
                "network": Network.of(info),
                "lifecycle": Lifecycle(auto_resume=info.terms.auto_resume, on_timeout=info.on_timeout),
                "pause_mode": ("full" if info.has_memory else "filesystem") if paused else None,
            }
        )


def template_of(info: SandboxInfo) -> str:
    """Its ``templateID``: the catalog's name if it was started by one, else the snapshot's id."""
    return info.name or info.snapshot_id


def _row(info: SandboxInfo) -> dict[str, object]:
    return {
        "template_id": template_of(info),
        "sandbox_id": info.sandbox_id,
        "started_at": at(info.created_at_s),
        "end_at": at(info.expires_at_s),
        "cpu_count": info.machine.cpus,
        "memory_mb": info.machine.memory_mib,
        "disk_size_mb": info.machine.disk_mib,
        "state": SHOWN[info.state],
        "alias": info.terms.alias,
        "metadata": info.metadata,
    }
