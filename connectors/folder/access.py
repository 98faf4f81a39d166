"""``.penstock.toml`` says who may read a folder, and which of its files are published, by patterns as in .gitignore."""

from __future__ import annotations

import os
import re
import stat as modes
import tomllib
from dataclasses import dataclass, replace

from connectors.folder.options import FolderOptions, tags
from connectors.folder.patterns import MAX_PATTERN_CHARACTERS, compiled
from pipeline.core.errors import Misconfigured

FILE = ".penstock.toml"
KEYS = ("acl", "required", "exclude", "include")
MAX_BYTES = 1024 * 1024
MAX_PATTERNS = 1_000
"""The most patterns in one list. Each file is compared with each of them."""
MAX_CHARACTERS = 50_000
"""The most characters of all patterns of ``exclude``, with those of the folders above, and of ``include``: a name of
two thousand characters is compared with them in a twentieth of a second."""
MAX_DOTS = 100
"""The most dots outside of texts, of which valid settings have none: the library takes time with the square of the
parts of a key, half an hour for one of a megabyte."""
_TEXTS = re.compile(
    r'"""(?:\\.|[^\\"]|"(?!""))*+(?:"{3,5}|\Z)|"(?:\\[^\n]|[^"\\\n])*+"?'
    r"|'''(?:[^']|'(?!''))*+(?:'{3,5}|\Z)|'[^'\n]*+'?|#[^\n]*+",
    re.DOTALL,
)
"""Texts and comments of TOML."""

SKIPPED = re.compile(r"\..*|node_modules|__pycache__|.*~|~\$.*|#.*#|.*\.(?:swp|swo|part|crdownload)", re.DOTALL)
"""Names that are skipped by default: hidden files, caches of programs, temporary files of editors and downloads."""


def is_skipped(path: str, root: str) -> bool:
    """Whether the path, or a folder between the root and it, is skipped by default."""
    return path != root and any(SKIPPED.fullmatch(name) for name in os.path.relpath(path, root).split("/"))


class PolicyError(Exception):
    """A ``.penstock.toml`` is invalid or cannot be read: nothing under it may be published."""


@dataclass(frozen=True, slots=True)
class Patterns:
    folder: str
    patterns: tuple[str, ...]

    @property
    def characters(self) -> int:
        return sum(map(len, self.patterns))

    def match(self, path: str) -> bool:
        relative = path.removeprefix(self.folder.rstrip("/")).lstrip("/")
        return any(compiled(pattern).fullmatch(relative) for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of one folder. The nearest file that sets ``acl`` (``required``, ``include``) decides it alone;
    ``exclude`` patterns add up."""

    acl_tags: tuple[str, ...]
    required_tags: tuple[str, ...]
    acl_from: str | None = None
    """Path of the file that set ``acl``."""
    excludes: tuple[Patterns, ...] = ()
    include: Patterns | None = None

    @classmethod
    def of(cls, options: FolderOptions) -> Policy:
        return cls(options.acl_tags, options.required_tags)

    def within(self, folder: str) -> Policy:
        """Return the rules of a folder below. Raises PolicyError."""
        path = os.path.join(folder, FILE)
        raw = _read(path)
        return self if raw is None else self.with_file(raw, path, folder)

    def with_file(self, raw: bytes, path: str, folder: str) -> Policy:
        """Return the rules of a folder below, whose ``.penstock.toml`` has this path and content. Raises
        PolicyError."""
        settings = _parsed(raw)
        policy = self
        try:
            if "acl" in settings:
                policy = replace(policy, acl_tags=tags(settings["acl"], "acl"), acl_from=path)
            if "required" in settings:
                policy = replace(policy, required_tags=tags(settings["required"], "required"))
        except Misconfigured as error:
            raise PolicyError(str(error)) from error
        if "exclude" in settings:
            policy = replace(policy, excludes=(*policy.excludes, _patterns(folder, "exclude", settings["exclude"])))
            if sum(patterns.characters for patterns in policy.excludes) > MAX_CHARACTERS:
                raise PolicyError(
                    f"exclude: with those of the folders above, at most {MAX_CHARACTERS:,} characters of patterns"
                )
        if "include" in settings:
            policy = replace(policy, include=_patterns(folder, "include", settings["include"]))
        return policy

    def admits_folder(self, path: str) -> bool:
        return not SKIPPED.fullmatch(os.path.basename(path)) and not any(e.match(path) for e in self.excludes)

    def admits_file(self, path: str) -> bool:
        return self.admits_folder(path) and (self.include is None or self.include.match(path))


def _read(path: str) -> bytes | None:
    """Return the file's content; None if there is no file. Any other failure is an error, since the file may restrict
    access. Raises PolicyError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PolicyError(f"cannot be read ({error.strerror})") from error
    try:
        with open(descriptor, "rb") as file:
            if not modes.S_ISREG(os.fstat(descriptor).st_mode):
                raise PolicyError("is not a regular file")
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise PolicyError(f"cannot be read ({error.strerror})") from error
    return raw


def _parsed(raw: bytes) -> dict[str, object]:
    if len(raw) > MAX_BYTES:
        raise PolicyError(f"is longer than {MAX_BYTES} bytes")
    try:
        text = raw.decode("utf-8-sig")
        if _TEXTS.sub("", text).count(".") > MAX_DOTS:
            raise PolicyError("has a key of very many parts")
        settings = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also one that Python refuses, such as a number of 5,000 digits
        where = re.search(r"\(at line \d+, column \d+\)", str(error))
        raise PolicyError(f"is not valid TOML {where[0] if where else ''}".rstrip()) from error
    unknown = sorted(set(settings) - set(KEYS))
    if unknown:
        raise PolicyError(f"has the unknown key {unknown[0]!r} (known: {', '.join(KEYS)})")
    return settings


def _patterns(folder: str, name: str, patterns: object) -> Patterns:
    if not isinstance(patterns, list) or not all(
        isinstance(pattern, str) and pattern.strip("/") for pattern in patterns
    ):
        raise PolicyError(f'{name}: a list of patterns such as ["drafts/**", "*.tmp"]')
    if len(patterns) > MAX_PATTERNS or any(len(pattern) > MAX_PATTERN_CHARACTERS for pattern in patterns):
        raise PolicyError(f"{name}: at most {MAX_PATTERNS} patterns of {MAX_PATTERN_CHARACTERS} characters each")
    if sum(map(len, patterns)) > MAX_CHARACTERS:
        raise PolicyError(f"{name}: at most {MAX_CHARACTERS:,} characters of patterns")
    try:
        for pattern in patterns:
            compiled(pattern)
    except re.error as error:
        raise PolicyError(f"{name}: invalid pattern ({error.msg})") from error
    return Patterns(folder, tuple(patterns))
