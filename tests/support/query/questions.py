"""Questions as people ask them, about the Python documentation topics that every Python brings (``pydoc_data``).

Several topics repeat others (``compound`` holds ``for``, ``specialnames`` holds ``customization`` …): a question names
all topics that answer it.
"""

from __future__ import annotations

QUESTIONS: tuple[tuple[str, frozenset[str]], ...] = tuple(
    (question, frozenset(topics.split()))
    for question, topics in (
        ("What happens in a loop's else branch when I leave it with break?", "for while break compound else"),
        ("How can I skip to the next round of a loop?", "continue for while"),
        ("catch several kinds of errors in one clause", "try compound exceptions"),
        ("Which methods does an object need for a with block?", "context-managers specialnames with compound"),
        ("format a number with thousands separators", "formatstrings string-methods"),
        ("What does the 'n' presentation type do for floats?", "formatstrings"),
        ("set a breakpoint and step through my program", "debugger"),
        ("pdb command to show the current stack trace", "debugger"),
        ("change a variable of the enclosing function from an inner function", "nonlocal naming execmodel"),
        ("Is 0.1 + 0.2 spelled with an exponent allowed, and how are floats written?", "floating numbers"),
        ("write an integer with underscores or in hexadecimal", "integers"),
        ("difference between is and ==", "comparisons objects"),
        ("What values count as false?", "truth booleans"),
        ("How do I define an anonymous function in an expression?", "lambda"),
        ("default argument values are evaluated only once", "function compound"),
        ("relative imports with leading dots", "import"),
        ("why does my module say __future__ must be at the top", "import"),
        ("unpack a list into several variables with a star", "assignment exprlists"),
        ("which operator binds tighter, not or and", "operator-summary booleans power unary"),
        ("remove an element from a list at an index and return it", "typesseq-mutable typesseq"),
        ("What is __slots__ good for?", "attribute-access specialnames types"),
        ("customize what happens when an attribute is missing", "attribute-access specialnames"),
        ("How to make my class support len() and indexing?", "sequence-types specialnames"),
        ("overload the plus operator for my own type", "numeric-types specialnames"),
        ("when is an object garbage collected", "objects customization specialnames"),
        ("strip whitespace from both ends of a string", "string-methods"),
        ("split a text at every newline", "string-methods"),
        ("raw strings and escape sequences", "strings"),
        ("get a value from a dictionary with a fallback if the key is absent", "typesmapping"),
        ("merge two dictionaries", "typesmapping"),
        ("raise a new error while keeping the original cause", "raise exceptions"),
        ("wait for the result of a coroutine", "await async"),
        ("turn a function into a generator", "yield types"),
        ("statement that does nothing, as a placeholder", "pass"),
        ("names that begin with two underscores are mangled", "id-classes atom-identifiers identifiers"),
        ("call a function with keyword arguments from a dict", "calls"),
        ("check that a debugging condition holds, unless run with -O", "assert"),
        ("shift bits to the left", "shifting"),
        ("metaclass keyword and class creation", "class customization specialnames compound"),
        ("remove a name from the local namespace", "del"),
    )
)
