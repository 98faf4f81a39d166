"""How a guide's commands and what they print are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.deploy.console import Command, commands, shell

GUIDE = """
# Guide

```console
$ echo one
one
$ cat <<END
> two
>
> END
two

```

```
$ not this
```

```console eventually
$ date
…
```
"""


def test_commands_of_a_guide_are_read_with_their_lines_and_expected_output() -> None:
    assert commands(GUIDE) == [
        Command(5, "echo one", "one", eventually=False),
        Command(7, "cat <<END\ntwo\n\nEND", "two\n", eventually=False),
        Command(20, "date", "…", eventually=True),
    ]


@pytest.mark.parametrize(
    ("prints", "printed", "same"),
    [
        ("", "", True),
        ("", "something\n", False),
        ("one", "one  \n", True),
        ("one", "two\n", False),
        ("one", "one\ntwo\n", False),
        ("took … s", "took 1.5 s\n", True),
        ("took … s", "took 1.5\n s\n", False),
        ("…\nready\n…", "a\nb\nready\nc\n", True),
        ("…\nready\n…", "ready\n", True),
        ("…\nready", "a\nready\nc\n", False),
        ("a.c", "abc\n", False),
    ],
)
def test_the_output_of_a_command_is_compared_with_the_guide(prints: str, printed: str, *, same: bool) -> None:
    assert Command(1, "", prints, eventually=False).matches(printed) is same


def test_the_guides_shell_keeps_variables_and_reports_failed_commands(tmp_path: Path) -> None:
    with shell(tmp_path, {"PATH": "/usr/bin:/bin"}) as bash:
        bash.run(Command(1, "A=heron", "", eventually=False))
        assert bash.run(Command(2, r"printf '\e[1m%s\e[0m\n' $A", "heron", eventually=False)) == "heron\n"
        with pytest.raises(AssertionError, match="ended with 1"):
            bash.run(Command(3, "false", "", eventually=False))
        with pytest.raises(AssertionError, match="where the guide shows:\notter"):
            bash.run(Command(4, "echo $A", "otter", eventually=False))
        bash.run(Command(5, "sleep 1000 &", "", eventually=False))
        bash.run(Command(6, "test -e made || ! touch made", "", eventually=True))
