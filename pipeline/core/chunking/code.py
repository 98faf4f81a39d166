"""Source code by its syntax tree: definitions whole while they fit, else by member and statement, signature repeated.

All boundaries are line starts, so the parser's byte offsets never matter: rows are counted alike in bytes and code
points. Only nodes too large for one unit are opened; the walk is short however long the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import tree_sitter_bash
import tree_sitter_c
import tree_sitter_cpp
import tree_sitter_go
import tree_sitter_java
import tree_sitter_javascript
import tree_sitter_python
import tree_sitter_rust
import tree_sitter_sql
import tree_sitter_typescript
from tree_sitter import Language, Node, Parser

from pipeline.core.chunking.units import BOUND, DEEPEST, GLUE, LINE, PARAGRAPH, SECTION, Block, heading_path
from pipeline.core.model import Span

GRAMMARS: dict[str, Callable[[], object]] = {
    "text/x-python": tree_sitter_python.language,
    "text/javascript": tree_sitter_javascript.language,
    "text/typescript": tree_sitter_typescript.language_typescript,
    "text/tsx": tree_sitter_typescript.language_tsx,
    "text/x-java": tree_sitter_java.language,
    "text/x-go": tree_sitter_go.language,
    "text/x-rust": tree_sitter_rust.language,
    "text/x-c": tree_sitter_c.language,
    "text/x-c++": tree_sitter_cpp.language,
    "application/sql": tree_sitter_sql.language,
    "application/x-sh": tree_sitter_bash.language,
}

_DEFINITION = re.compile(
    r"function_definition|class_definition|method_definition|macro_definition|namespace_definition|concept_definition"
    r"|(abstract_class|class|function|generator_function|method|constructor|compact_constructor|interface|enum|record"
    r"|annotation_type|type_alias|type)_declaration"
    r"|(function|impl|trait|mod|struct|enum|union)_item|(class|struct|union|enum)_specifier|internal_module|module"
    r"|create_(function|procedure|table|view|materialized_view|trigger|type)"
)
_WRAPPERS = frozenset(
    {"decorated_definition", "export_statement", "template_declaration", "statement", "ambient_declaration"}
)
_VARIABLES = frozenset({"lexical_declaration", "variable_declaration"})
_FUNCTION_VALUES = frozenset({"arrow_function", "function_expression", "generator_function", "class"})
_BODY = re.compile(
    r"block|.*_block|body|.*_body|.*declaration_list|compound_statement|statement_list|enum_variant_list|column_definitions"
)
_LEADING = re.compile(r"comment|line_comment|block_comment|attribute_item|decorator|marginalia")

_GAP = re.compile(r"(?<!\n)\n{2,}+(?=\S)")
"""Blank lines before an unindented line: all that is known of code that cannot be parsed. Each run is tried once: a
megabyte of newlines would otherwise take hours."""
_SIGNATURE_CHARS = 600
_SIGNATURE_LINES = 12
_MAX_DEPTH = 60
_MAX_CHILDREN = 50_000
_MAX_BYTES = 1 << 20
"""Source files of more than that are generated; and a tree of hostile nesting takes 250 bytes for each of theirs."""
_STEPS = 2_000
_STEPS_PER_KILOBYTE = 12
_STEPS_AFTER_ERROR = 4
"""Progress reports that the parser may make by the time it has come so far, those of error recovery weighed by their
cost. Real code needs 2 to 9 a kilobyte; a file that needs far more is given up after a second or so."""
_PARSE_SECONDS = 5.0
"""Seconds of processor time. No count bounds what a step costs: errors with comments between them take the longer, the
more of them came before. Real code of _MAX_BYTES takes a tenth of this: only a hostile file may be cut differently the
next time."""
_READ = 1024
_READS_PER_KILOBYTE = 32
"""How often the parser may ask for a kilobyte. Real code needs 1 to 3; a grammar whose scanner can be made to look
ahead to the end of the file at every token, thousands. These bounds count and do not time: the same text gives the same
chunks."""


def parse(text: str, media_type: str, target: int, clock: Callable[[], float] | None = None) -> list[Block]:
    """Blocks of source code. target: tokens of a chunk, which decides how far definitions are opened. clock: of
    the processor's time, in seconds; without one only counts bound the parser."""
    if not text:
        return []
    walk = _Walk(text, target)
    source = text.encode()
    root = _tree(source, media_type, clock or (lambda: 0.0)) if len(source) <= _MAX_BYTES else None
    if root is None:
        return cut_at_blank_lines(text)
    walk.members(root, 0, (), (), glued=False)
    return walk.blocks


def cut_at_blank_lines(text: str) -> list[Block]:
    """Blocks of code that cannot be parsed."""
    return [
        Block(0, PARAGRAPH, prose=False),
        *(Block(m.end(), PARAGRAPH, prose=False) for m in _GAP.finditer(text)),
    ]


@cache
def language(media_type: str) -> Language:
    """The grammar of a media type in GRAMMARS."""
    return Language(GRAMMARS[media_type]())


def _tree(source: bytes, media_type: str, clock: Callable[[], float]) -> Node | None:
    """The root node; None when the parser takes too much work."""
    steps, ends = 0, clock() + _PARSE_SECONDS
    reads = 64 + len(source) * _READS_PER_KILOBYTE // 1024
    # The binding (0.26) keeps a reference to everything that it reads, for ever: to one buffer, which ends up empty.
    buffer = bytearray()

    def read(offset: int, _point: object) -> bytearray:
        nonlocal reads
        reads -= 1
        # Also after ``reads``: a parser that reads less than before writes beyond its memory.
        buffer[:] = source[offset : offset + _READ]
        return buffer

    def stop(offset: int, has_error: bool) -> bool:
        nonlocal steps
        steps += _STEPS_AFTER_ERROR if has_error else 1
        return reads <= 0 or steps > _STEPS + offset * _STEPS_PER_KILOBYTE // 1024 or clock() > ends

    try:
        tree = Parser(language(media_type)).parse(read, progress_callback=stop)
    except ValueError:  # how the binding says that the parse was stopped
        return None
    finally:
        buffer.clear()
    return tree.root_node if reads > 0 else None


class _Walk:
    def __init__(self, text: str, target: int) -> None:
        self.text = text
        self.rows = [0, *(match.end() for match in re.finditer("\n", text)), len(text)]
        self.whole = target * 5 // 2
        """Bytes up to which a definition is one unit."""
        self.small = target
        """Bytes up to which a statement in a long definition is one unit."""
        self.blocks = [Block(0, PARAGRAPH, prose=False)]
        self.last_row = -1

    def members(self, node: Node, depth: int, path: tuple[str, ...], prefix: tuple[Span, ...], *, glued: bool) -> None:
        """Blocks for what stands in a node. glued: the first one belongs to the line before it."""
        if depth > _MAX_DEPTH or node.child_count > _MAX_CHILDREN:
            return
        leading_until = -1
        previous_end = -1
        for child in node.named_children:
            row = child.start_point.row
            large = child.end_byte - child.start_byte > self.small
            definition = _definition(child) if depth < DEEPEST else None
            own = path
            if definition is not None:
                own = heading_path((*path, self._label(definition)))
            if row > self.last_row:
                if glued or row <= leading_until:
                    rank = GLUE
                else:
                    rank = self._rank(depth, definition is not None, row > previous_end + 1)
                self._emit(row, rank, own, prefix)
            glued = False
            if definition is not None:
                if definition.end_byte - definition.start_byte > self.whole:
                    self._open(definition, depth, own, prefix)
            elif large:
                body = bool(_BODY.fullmatch(child.type))
                self.members(child, depth if body else depth + 1, path, prefix, glued=body)
            end = child.end_point
            previous_end = end.row - (end.column == 0)
            leading_until = previous_end + 1 if _LEADING.fullmatch(child.type) else -1

    def _rank(self, depth: int, definition: bool, after_blank_line: bool) -> int:
        if depth:
            return min(BOUND + depth - 1, DEEPEST)
        return SECTION if definition else PARAGRAPH if after_blank_line else LINE

    def _emit(self, row: int, rank: int, path: tuple[str, ...], prefix: tuple[Span, ...]) -> None:
        self.last_row = row
        block = Block(self.rows[row], rank, False, path, prefix)
        if block.start == self.blocks[-1].start:
            self.blocks[-1] = block
        elif block.start < len(self.text):
            self.blocks.append(block)

    def _open(self, definition: Node, depth: int, path: tuple[str, ...], prefix: tuple[Span, ...]) -> None:
        """Go into a definition that is too large for one unit."""
        body = definition.child_by_field_name("body")
        if body is None:
            body = next((c for c in reversed(definition.named_children) if _BODY.fullmatch(c.type)), None)
        if body is None:
            self.members(definition, depth + 1, path, prefix, glued=True)
            return
        first = next((c.start_point.row for c in body.named_children), body.start_point.row)
        remarks = (c for c in definition.children if "comment" in c.type and c.end_byte <= body.start_byte)
        # A remark above the first member is the member's: every chunk of the definition would change with it.
        first = min([first, *(c.start_point.row for c in remarks if c.start_point.row > definition.start_point.row)])
        signature = self._signature(definition.start_point.row, first)
        self.members(body, depth + 1, path, (*prefix, signature) if signature else prefix, glued=True)

    def _signature(self, row: int, first_row: int) -> Span | None:
        """The lines of a definition before its body, or the first of them if they are many; None for a monster."""
        for end in (first_row, row + 1):
            if row < end <= row + _SIGNATURE_LINES and self.rows[end] - self.rows[row] <= _SIGNATURE_CHARS:
                return self.rows[row], self.rows[end]
        return None

    def _label(self, definition: Node) -> str:
        """``class Queue``, ``def get``, ``impl Iterator for Walk``: the signature up to its parameters or body."""
        row = definition.start_point.row
        line = self.text[self.rows[row] : min(self.rows[row + 1], self.rows[row] + 400)].strip()
        while line.startswith(("@", "#[")) and row < definition.end_point.row:
            row += 1
            line = self.text[self.rows[row] : min(self.rows[row + 1], self.rows[row] + 400)].strip()
        return re.split(r"(?<=\w)\(|\s*[{;]|:\s*$|\s+AS\b|\s*=>", line, maxsplit=1)[0].strip()


def _definition(node: Node) -> Node | None:
    """The definition that a node is or wraps (decorators, export, template, const f = () => …)."""
    for _ in range(3):
        if _DEFINITION.fullmatch(node.type):
            return node
        if node.type in _VARIABLES:
            declarator = node.named_children[-1] if node.named_children else None
            value = declarator.child_by_field_name("value") if declarator else None
            return value if value is not None and value.type in _FUNCTION_VALUES else None
        if node.type not in _WRAPPERS or not node.named_children:
            return None
        node = (
            node.child_by_field_name("definition") or node.child_by_field_name("declaration") or node.named_children[-1]
        )
    return None
