"""The options of a source that runs an Airbyte source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from connectors.base import ReadersOptions
from connectors.row_options import RowOptions
from pipeline.core.errors import Misconfigured

CDC_DELETED = "_ab_cdc_deleted_at"
"""The field in which Airbyte's sources of change data capture say that a record was deleted."""
Sync = Literal["incremental", "full_refresh"]


class StreamOptions(RowOptions):
    """A stream, and which documents its records make. Its fields are called columns. A field within another is written
    with dots: ``{owner.name}``; within an array it stands for the values of all elements. A field that a record lacks
    counts as NULL. A stream without ``acl`` and ``acl_tags`` has the acl_tags of the source."""

    COLUMN: ClassVar[str] = "field"

    stream: str | None = None
    """The stream's name, if it is not that of this table."""
    namespace: str | None = None
    """The stream's namespace, if it has one."""
    id: tuple[str, ...] = ()
    """The fields that identify a record. Default: the primary key that the program names."""
    deleted: str | None = CDC_DELETED
    """The field that marks a record as deleted: a time or true. Null, false and 0 mean that it exists."""
    sync: Sync | None = None
    """``incremental`` reads what is new, ``full_refresh`` reads everything each time. Default: incremental where the
    program can."""
    cursor: str | None = None
    """The field that grows with each change, for incremental streams. Default: the one that the program names."""
    reread_seconds: float = Field(86_400, ge=0)
    """The interval at which an incremental stream is read from its beginning, which finds records that are gone. 0:
    never."""

    @staticmethod
    def is_column(name: str) -> bool:
        return name != "" and not set(name) & set("!:[]{}") and not name[0].isdigit()


class AirbyteOptions(ReadersOptions):
    """acl_tags and required_tags hold for every stream that has no readers of its own."""

    program: tuple[str, ...] = Field(min_length=1)
    """The program and its first arguments. It is run without a shell. ``{folder}`` stands for the folder with the files
    that it is handed."""
    config: SecretStr | None = None
    """The program's configuration, as JSON. It is merged into that of ``config_file``."""
    config_file: Path | None = None
    """A JSON file with the program's configuration, or with the part of it that is no secret."""
    pass_environment: tuple[str, ...] = ()
    """Variables that the program is handed in addition to PATH, such as ``HTTPS_PROXY`` or ``JAVA_HOME``."""
    streams: Mapping[str, StreamOptions] = {}
    """The streams to read, by the name with which the ids of their documents begin."""
    silence_seconds: float = Field(900, gt=0, le=86_400)
    """A program that writes nothing for so long is ended."""
    max_record_bytes: int = Field(16 * 1024 * 1024, ge=1_024)
    """A longer message of the program is refused."""
    max_records_bytes: int = Field(8 * 1024**3, ge=1024**2)
    """The most that the records of all streams may take on disk."""

    @field_validator("program")
    @classmethod
    def _is_absolute(cls, program: tuple[str, ...]) -> tuple[str, ...]:
        if "/" in program[0] and not program[0].startswith("/"):
            raise ValueError("write the program's absolute path, or its name if it is on PATH")
        return program

    @model_validator(mode="after")
    def _has_readers(self) -> Self:
        for name, stream in self.streams.items():
            if not (stream.acl or stream.acl_tags or self.acl_tags):
                raise ValueError(
                    f"an Airbyte source does not say who may read: write acl_tags and members, or"
                    f' streams.{name}.acl = ["FIELD"] with a field that holds tags'
                )
        return self

    def effective(self, name: str) -> StreamOptions:
        """Return a stream's options with its readers."""
        stream = self.streams[name]
        readers = {} if stream.acl or stream.acl_tags else {"acl_tags": self.acl_tags}
        required = dict.fromkeys([*self.required_tags, *stream.required_tags])
        return stream.model_copy(update={**readers, "required_tags": tuple(required)})

    def configuration(self) -> dict[str, Any]:
        """Return the program's configuration. Blocks. Raises Misconfigured."""
        configuration: dict[str, Any] = {}
        if self.config_file is not None:
            try:
                configuration = json.loads(self.config_file.read_text("utf-8"))
            except (OSError, ValueError) as error:
                raise Misconfigured(f"{self.config_file} cannot be read as JSON ({type(error).__name__})") from error
        secret: Any = {}
        if self.config is not None:
            try:
                secret = json.loads(self.config.get_secret_value())
            except ValueError as error:
                raise Misconfigured("config is not valid JSON: write an object in the environment") from error
        if not isinstance(configuration, dict) or not isinstance(secret, dict):
            raise Misconfigured("config and config_file have to hold a JSON object each")
        return _merged(configuration, secret)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return two objects as one; of two values with one name, the second."""
    merged = dict(below)
    for name, value in above.items():
        inner = merged.get(name)
        merged[name] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged
