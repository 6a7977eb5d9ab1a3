"""What goes on although its lease cannot be written, and what does not."""

from __future__ import annotations

import errno

from aenv_run.errors import AenvError, Unauthenticated, Unsupported
from aenv_run.repository import Repository

#: ``on``: launches and builds go on where their lease can never be written, and nothing keeps what they use.
UNHELD_VARIABLE = "AENV_ALLOW_UNHELD"


def require_held(repository: Repository, error: AenvError, what: str) -> None:
    """Raise why the lease of ``what`` could not be written, unless that is for good and the operator allows it."""
    if repository.allow_unheld and is_for_good(error):
        return
    raise refusal(error, what) from error


def refusal(error: AenvError, what: str) -> AenvError:
    """The same error, saying what it means here and what to do."""
    fix = error.fix
    if is_for_good(error):
        fix = (
            "let this user write, read and delete below leases/ of the repository; or, if nobody ever runs "
            f"`aenv gc` on it, set {UNHELD_VARIABLE}=on (docs/garbage.md)"
        )
    return type(error)(f"{what} cannot be held against `aenv gc`: {error.message}", fix=fix)


def is_for_good(error: AenvError) -> bool:
    """Whether the lease may not be written here, and no wait changes that."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, Unauthenticated | Unsupported):
            return True
        if isinstance(seen, OSError) and seen.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return True
        seen = seen.__cause__
    return False
