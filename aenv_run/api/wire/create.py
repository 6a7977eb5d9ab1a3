"""Bodies that ask for a sandbox. Each generation of the API keeps its own defaults."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from aenv_run.api.wire.model import Asked, Flag, Strings, Text, Whole
from aenv_run.errors import InvalidInput
from aenv_run.network import NetworkPolicy
from aenv_run.node_wire import MAX_TIMEOUT_S, CreateRequest
from aenv_run.sandbox_record import Terms

#: The defaults of E2B's two generations.
TIMEOUT_V1_S, TIMEOUT_V2_S = 15, 300
Timeout = Annotated[Whole, Field(ge=0, le=MAX_TIMEOUT_S, description="seconds; 0: its time is over at once")]
Targets = Annotated[tuple[Annotated[Text, Field(max_length=255)], ...], Field(max_length=1000)]
_HOST = re.compile(r"[A-Za-z0-9_.-]{1,253}(?::[0-9]{1,5})?")


def _host(text: str) -> str:
    if not _HOST.fullmatch(text.replace("${PORT}", "1")):
        raise ValueError("it is not a host, such as app.example.org or localhost:${PORT}")
    return text


class NetworkAsked(Asked):
    """``network``: egress by address and name, and who may reach its ports."""

    allow_public_traffic: Flag | None = None
    allow_out: Targets | None = None
    deny_out: Targets | None = None
    mask_request_host: Annotated[str, AfterValidator(_host)] | None = None
    dns_servers: tuple[str, ...] | None = None
    egress_proxy: dict[str, object] | None = None
    https_ports: tuple[Whole, ...] | None = None
    rules: dict[str, object] | None = None

    def refused(self) -> str | None:
        """The first part that is asked for and cannot be had."""
        parts = {
            "dnsServers": self.dns_servers,
            "egressProxy": self.egress_proxy,
            "httpsPorts": self.https_ports,
            "rules": self.rules,
        }
        return next((f"network.{name}" for name, value in parts.items() if value), None)


class AutoResume(Asked):
    """``autoResume``."""

    enabled: Flag


class CreateV2(Asked):
    """POST /v2/sandboxes."""

    template_id: Annotated[Text, Field(min_length=1, max_length=256)]
    timeout: Timeout | None = None
    auto_pause: Flag | None = None
    auto_pause_memory: Flag | None = Field(None, description="false: pause keeps the file system only")
    auto_resume: AutoResume | None = None
    allow_internet_access: Flag | None = Field(None, alias="allow_internet_access")
    network: NetworkAsked | None = None
    metadata: Annotated[Strings, Field(max_length=256)] | None = None
    env_vars: Annotated[Strings, Field(max_length=1024)] | None = None
    mcp: dict[str, object] | None = None
    iam: dict[str, object] | None = None
    volume_mounts: tuple[dict[str, object], ...] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.auto_pause_memory is False and self.auto_resume is not None and self.auto_resume.enabled:
            raise ValueError("autoResume needs the memory: it cannot be with autoPauseMemory false")
        return self

    def refused(self) -> str | None:
        """The first part that is asked for and cannot be had."""
        parts = {"mcp": self.mcp, "iam": self.iam, "volumeMounts": self.volume_mounts}
        own = next((name for name, value in parts.items() if value), None)
        return own or (self.network.refused() if self.network else None)

    @property
    def seconds(self) -> int:
        """Its time to live."""
        return TIMEOUT_V2_S if self.timeout is None else self.timeout

    @property
    def pauses(self) -> bool:
        """What becomes of it then."""
        return bool(self.auto_pause)

    @property
    def is_secure(self) -> bool:
        """Whether its daemon asks callers for a token."""
        return True

    def to_node(self, snapshot: str, *, request: str, alias: str | None) -> CreateRequest:
        """The node's request for ``snapshot``."""
        network = self.network or NetworkAsked()
        internet, allow, deny = egress(self.allow_internet_access, network.allow_out, network.deny_out)
        terms = Terms(
            alias=alias,
            secure=self.is_secure,
            auto_resume=self.auto_resume is not None and self.auto_resume.enabled,
            pause_memory=self.auto_pause_memory is not False,
            public_ports=network.allow_public_traffic is not False,
            mask_host=network.mask_request_host,
            request=request,
        )
        return CreateRequest(
            snapshot=snapshot,
            timeout_s=self.seconds,
            on_timeout="pause" if self.pauses else "kill",
            metadata=self.metadata or {},
            env=self.env_vars or {},
            internet=internet,
            allow=allow,
            deny=deny,
            terms=terms,
        )


class CreateV1(CreateV2):
    """POST /sandboxes: 15 s, paused at their end, and a daemon that asks for no token unless ``secure``."""

    secure: Flag | None = None
    custom_extension_params: dict[str, object] | None = None

    def refused(self) -> str | None:
        """As in v2, and extensions."""
        return "customExtensionParams" if self.custom_extension_params else super().refused()

    @property
    def seconds(self) -> int:
        """Its time to live."""
        return TIMEOUT_V1_S if self.timeout is None else self.timeout

    @property
    def pauses(self) -> bool:
        """What becomes of it then."""
        return self.auto_pause is not False

    @property
    def is_secure(self) -> bool:
        """Whether its daemon asks callers for a token."""
        return bool(self.secure)


def egress(
    internet: bool | None, allow: tuple[str, ...] | None, deny: tuple[str, ...] | None
) -> tuple[bool | None, tuple[str, ...], tuple[str, ...]]:
    """E2B's rules (what is allowed wins over what is denied) as the node has them.

    True is the API's default, and means: as far as this node can.
    """
    if allow and internet is not False and not deny:
        raise InvalidInput(
            "network.allowOut alone restricts nothing: all is allowed already",
            fix='add "0.0.0.0/0" to denyOut, or set allow_internet_access to false',
        )
    policy = NetworkPolicy.allow_wins(internet=internet is not False, allow=allow or (), deny=deny or ())
    return (None if policy.internet else False), policy.allow, policy.deny
