"""The state folder of this installation. It is separate from the settings, because a command that only calls the
running service needs nothing else."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from secrets import token_urlsafe
from tempfile import mkstemp

from pipeline.core.errors import Misconfigured

ENDPOINTS_FILE = "endpoints.json"
"""A file in the state folder with the addresses of the running local stack's services."""

DEVELOPMENT_FILE = "development-token"
"""A file in the state folder with the header line (``curl -H @FILE``) that proves to a query service in development
mode that its own user calls. A token on a command line could be read by everybody on the machine."""

FEEDBACK_FILE = "feedback-key"
"""A file in the state folder with the key under which a service in development mode stores the author of feedback."""

TRAIL_FILE = "trail-key"
"""A file in the state folder with the key of the audit trail, which `penstock up` creates for a new local stack."""

BEARER = "Authorization: Bearer "
SHORTEST_SECRET = 32
"""Characters. Guesses are not slowed down."""


def home() -> Path:
    """The one state folder: ``$PENSTOCK_HOME``, default ``.penstock`` in the current folder.

    Raises Misconfigured if the default belongs to another user. It names the servers that documents and passwords are
    sent to.
    """
    if (chosen := os.environ.get("PENSTOCK_HOME")) is not None:
        return Path(chosen).absolute()
    return of_current_folder(".penstock", variable="PENSTOCK_HOME").absolute()


def of_current_folder(name: str, *, variable: str) -> Path:
    """The path in the current folder that is used where nobody names another one. variable: the environment variable
    that names it. Raises Misconfigured if it belongs to another user: many people may write to the current folder."""
    path = Path(name)
    with suppress(OSError):
        owners = {path.lstat().st_uid, path.stat().st_uid}
        if not owners <= {os.geteuid(), 0}:
            raise Misconfigured(f"{path.absolute()} belongs to another user: if you mean it, name it in {variable}")
    return path


def made_secret(file: Path, before: str = "") -> None:
    """Create a secret that this user alone can read, unless there is one. Several processes may do so at the same time.
    before: text in front of it in the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = f"{before}{token_urlsafe(32)}\n"
    descriptor, name = mkstemp(dir=file.parent, prefix=f".{file.name}.")  # of this user alone from the beginning
    try:
        with os.fdopen(descriptor, "w") as written:
            written.write(text)
        with suppress(FileExistsError):
            try:
                os.link(name, file)  # whole or not at all
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links
                with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
                    written.write(text)
    finally:
        os.unlink(name)


def secret(file: Path) -> str:
    """The secret that ``made_secret`` wrote. Raises FileNotFoundError, and Misconfigured if it cannot be read or other
    users can read it."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Misconfigured(f"cannot read {file}: {error.strerror}") from error
    with os.fdopen(descriptor) as opened:
        status = os.fstat(opened.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o077 or not stat.S_ISREG(status.st_mode):
            raise Misconfigured(
                f"{file} must be a file that only its owner can read: delete it, and a new one is created"
            )
        text = opened.read().strip()
    if len(text) < SHORTEST_SECRET:
        raise Misconfigured(f"{file} holds no secret: delete it, and a new one is created")
    return text


def made_development_token(file: Path) -> None:
    made_secret(file, BEARER)


def development_token(file: Path) -> str:
    """Raises FileNotFoundError and Misconfigured, as ``secret`` does."""
    return secret(file).removeprefix(BEARER)


def page_address(url: str, file: Path) -> str | None:
    """The address of the page of a service in development mode, with the token that proves the user; None: the token
    cannot be read.

    The token is the fragment, which browsers do not send, and the page removes it from the address at once.
    """
    try:
        return f"{url.rstrip('/')}/#token={development_token(file)}"
    except (FileNotFoundError, Misconfigured):
        return None
