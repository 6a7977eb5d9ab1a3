"""aenv at run time: snapshots, catalog, drivers, sandboxes. Never imports aenv_build.

``from aenv_run import Sandbox, AsyncSandbox`` is the SDK; it is loaded when it is asked for, so that the
commands start fast.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own takes 10 ms to load, and every sandbox's supervisor loads this

if TYPE_CHECKING:
    from aenv_run.sdk import Sandbox
    from aenv_run.sdk_async import AsyncSandbox

__all__ = ["AsyncSandbox", "Sandbox"]


def __getattr__(name: str) -> object:
    if name == "Sandbox":
        from aenv_run.sdk import Sandbox

        return Sandbox
    if name == "AsyncSandbox":
        from aenv_run.sdk_async import AsyncSandbox

        return AsyncSandbox
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
