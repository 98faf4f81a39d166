"""docs/restore-drill.md is the transcript of the drill as it is played now."""

from __future__ import annotations

import re
from pathlib import Path

from deploy.drill_scenes import SCENES, Step

TRANSCRIPT = (Path(__file__).parents[3] / "docs" / "restore-drill.md").read_text()


def test_the_transcript_contains_the_drills_commands_in_order() -> None:
    typed = [line for scene in SCENES if isinstance(scene, Step) for line in scene.typed]
    assert re.findall(r"^\$ (.*)$", TRANSCRIPT, re.MULTILINE) == typed, (
        "run `python -m deploy.drill > docs/restore-drill.md`"
    )


def test_the_transcript_contains_the_expected_output_of_every_step() -> None:
    steps = TRANSCRIPT.split("```console\n")[1:]
    scenes = [scene for scene in SCENES if isinstance(scene, Step)]
    assert len(steps) == len(scenes)
    for step, scene in zip(steps, scenes, strict=True):
        printed = "\n".join(line for line in step.splitlines() if not line.startswith("$ "))
        assert re.search(scene.shows, printed, re.MULTILINE), scene.typed
    assert "The whole drill took" in TRANSCRIPT, "it came to its end"
