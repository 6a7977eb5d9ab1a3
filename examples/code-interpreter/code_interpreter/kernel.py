"""One kernel: runs cells one after another, can be interrupted, restarted and ended while one runs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty
from uuid import uuid4

from jupyter_client.manager import AsyncKernelManager

from code_interpreter.languages import kernel_for, set_variables
from code_interpreter.outputs import Line, error, line_of

READY_S = 120.0
#: While nothing is printed: how often to look whether the kernel lives and somebody still listens.
TICK_S = 0.5
#: A cell has this long to end after it was interrupted; one that will not is left to itself.
INTERRUPTED_S = 10.0
REPLY_S = 10.0
#: No history: it would be a file that is open when the memory is taken. Plain tracebacks, as E2B gives.
PYTHON = (
    "--HistoryManager.enabled=False",
    "--InteractiveShell.colors=NoColor",
    "--IPKernelApp.extensions=code_interpreter.extension",
    "--Session.packer=code_interpreter.packing.pack",
)


class Kernel:
    """A kernel for ``language`` that starts in ``cwd``; its sockets are files below ``sockets``.

    Files, since of a TCP connection that was closed before the memory is taken 0MQ crashes under gVisor when it is
    restored.
    """

    def __init__(self, language: str, cwd: str, sockets: Path) -> None:
        self.id, self.language, self.cwd = uuid4().hex, language, cwd
        self._manager = AsyncKernelManager(
            kernel_name=kernel_for(language), transport="ipc", connection_file=str(sockets / f"{self.id}.json")
        )
        self._turn = asyncio.Lock()
        self._ending = ""  # why the cell that runs now will not come to its end
        self._variables: dict[str, str] = {}

    async def start(self) -> None:
        """Until it takes cells."""
        arguments = list(PYTHON) if self.language == "python" else []
        await self._manager.start_kernel(cwd=self.cwd, extra_arguments=arguments)
        self._client = self._manager.client()
        self._client.start_channels(stdin=False, hb=False)
        await self._client.wait_for_ready(timeout=READY_S)

    async def execute(
        self, code: str, sandbox_variables: Mapping[str, str], variables: Mapping[str, str]
    ) -> AsyncIterator[Line | None]:
        """Lines of one cell; None now and then while there are none.

        ``variables`` hold for this cell, ``sandbox_variables`` from now on. The cell is interrupted when the
        caller closes this iterator before its end.
        """
        async with self._turn:
            yield None
            if not await self._manager.is_alive():
                yield await self._died()
                return
            changed = {
                name: value for name, value in sandbox_variables.items() if self._variables.get(name) != value
            }
            self._variables |= changed
            await self._silently(set_variables(self.language, changed | dict(variables)))
            try:
                async for line in self._run(code):
                    yield line
            finally:
                before = {name: self._variables.get(name) for name in variables}
                await self._silently(set_variables(self.language, before))

    async def restart(self) -> None:
        """Begin anew in the same directory; a cell that runs ends in an error."""
        self._ending = "ContextRestarting"
        await self._manager.signal_kernel(signal.SIGKILL)
        async with self._turn:
            self._ending = ""
            await self._begin_anew()

    async def close(self) -> None:
        """End it; a cell that runs ends in an error."""
        self._ending = "ContextRemoved"
        if await self._manager.is_alive():
            await self._manager.signal_kernel(signal.SIGKILL)
        async with self._turn:
            self._client.stop_channels()
            await self._manager.shutdown_kernel(now=True)

    async def _begin_anew(self) -> None:
        self._variables = {}
        await self._manager.restart_kernel(now=True)
        await self._client.wait_for_ready(timeout=READY_S)

    async def _died(self) -> Line:
        """Where it was not ended by a caller (out of memory, say) a new one takes its place, without its state."""
        if self._ending:
            return error(self._ending, "the context was restarted or removed while the cell ran")
        await self._begin_anew()
        return error("ContextRestarting", "the kernel had ended and was started again; its state is lost")

    async def _silently(self, code: str) -> None:
        if code and await self._manager.is_alive():
            async for _ in self._run(code, silent=True):
                pass

    async def _run(self, code: str, *, silent: bool = False) -> AsyncIterator[Line | None]:
        request = self._client.execute(
            code, silent=silent, store_history=not silent, allow_stdin=False, stop_on_error=False
        )
        running, failed = True, False
        try:
            while True:
                try:
                    message = await self._client.get_iopub_msg(timeout=TICK_S)
                except Empty:
                    if not await self._manager.is_alive():
                        running = False
                        yield await self._died()
                        return
                    yield None
                    continue
                if message["parent_header"].get("msg_id") != request:
                    continue
                if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                    running = False
                    break
                if (line := line_of(message)) is not None:
                    failed = failed or line["type"] == "error"
                    yield line
            status = await self._reply(request)
            if status != "ok" and not failed:
                yield error("ExecutionAborted", f"the kernel did not run the cell ({status})")
        finally:
            if running:
                await self._interrupt(request)

    async def _reply(self, request: str) -> str:
        """The status of what has been asked; read, so that answers do not pile up."""
        with suppress(Empty):
            while True:
                reply = await self._client.get_shell_msg(timeout=REPLY_S)
                if reply["parent_header"].get("msg_id") == request:
                    return str(reply["content"]["status"])
        return "no answer"

    async def _interrupt(self, request: str) -> None:
        with suppress(Empty, TimeoutError):
            async with asyncio.timeout(INTERRUPTED_S):
                await self._manager.interrupt_kernel()
                await self._reply(request)
