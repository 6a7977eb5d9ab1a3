"""What a kernel publishes while a cell runs, as the lines that a client reads."""

from __future__ import annotations

from collections.abc import Mapping

Line = dict[str, object]
Message = Mapping[str, object]

#: Where a MIME type has a field of its own.
FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}
END: Line = {"type": "end_of_execution"}


def line_of(message: Message) -> Line | None:
    """The line for a message of the kernel; None for one that clients do not see."""
    content = message["content"]
    assert isinstance(content, Mapping)
    match message["msg_type"]:
        case "stream":
            name = "stderr" if content["name"] == "stderr" else "stdout"
            return {"type": name, "text": content["text"], "timestamp": _nanoseconds(message)}
        case "display_data":
            return _result(content["data"], main=False)
        case "execute_result":
            return _result(content["data"], main=True)
        case "error":
            traceback = "\n".join(content.get("traceback", []))
            return error(content.get("ename", ""), content.get("evalue", ""), traceback)
        case "execute_input":
            return {"type": "number_of_executions", "execution_count": content["execution_count"]}
    return None


def error(name: str, value: str, traceback: str = "") -> Line:
    """A cell that ended in an error."""
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


def _result(data: Mapping[str, object], *, main: bool) -> Line:
    line: Line = {"type": "result", "is_main_result": main}
    extra = {}
    for kind, value in data.items():
        if kind in FIELDS:
            line[FIELDS[kind]] = _without_quotes(value) if kind == "text/plain" else value
        else:
            extra[kind] = value
    if extra:
        line["extra"] = extra
    return line


def _without_quotes(text: object) -> object:
    """E2B's clients expect the text of a string, not its Python literal."""
    if isinstance(text, str) and len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


def _nanoseconds(message: Message) -> int:
    header = message["header"]
    assert isinstance(header, Mapping)
    return int(header["date"].timestamp() * 1e6) * 1000
