"""What a client may call a language, which kernel runs it, and how environment variables are set in it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from jupyter_client.kernelspec import KernelSpecManager

DEFAULT = "python"
OTHER_NAMES = {"js": "javascript", "ts": "typescript", "python3": "python", "sh": "bash"}


class NoKernel(Exception):
    """No kernel of this image runs the language."""


def normal(language: str | None) -> str:
    """The language's own name."""
    name = (language or DEFAULT).strip().lower()
    return OTHER_NAMES.get(name, name)


def kernel_for(language: str) -> str:
    """The name of an installed kernel that runs it."""
    specs = KernelSpecManager().get_all_specs()
    known = {str(spec["spec"]["language"]).lower(): name for name, spec in sorted(specs.items())}
    for name in (language, "javascript" if language == "typescript" else language):
        if name in known:
            return known[name]
    raise NoKernel(f"this image has no kernel for {language!r}; it has kernels for: {', '.join(sorted(known))}")


def set_variables(language: str, values: Mapping[str, str | None]) -> str:
    """A cell that sets these variables and removes those that are None; empty where the language has no way."""
    if not values:
        return ""
    if language == "python":
        kept = {name: value for name, value in values.items() if value is not None}
        gone = [name for name, value in values.items() if value is None]
        return (
            f"__import__('os').environ.update({kept!r}); "
            f"[__import__('os').environ.pop(_name, None) for _name in {gone!r}]"
        )
    return "\n".join(filter(None, (_one(language, name, value) for name, value in values.items())))


def _one(language: str, name: str, value: str | None) -> str:
    # A JSON string is a string of these languages too.
    key, text = json.dumps(name), json.dumps(value)
    match language:
        case "javascript" | "typescript":
            return f"delete process.env[{key}]" if value is None else f"process.env[{key}] = {text}"
        case "r":
            return (
                f"Sys.unsetenv({key})" if value is None else f"do.call(Sys.setenv, setNames(list({text}), {key}))"
            )
        case "java":
            return f"System.clearProperty({key});" if value is None else f"System.setProperty({key}, {text});"
        case "bash" if value is None:
            return f"unset {name}"
        case "bash":
            quoted = value.replace("'", "'\\''")
            return f"export {name}='{quoted}'"
    return ""
