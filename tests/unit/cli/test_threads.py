"""Tests how many threads numpy gets in a process of Penstock."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

THREADS_AFTER_A_PRODUCT = """
import sys
from cli.main import main
sys.argv = ["penstock", "--version"]
try:
    main()
except SystemExit:
    pass
import numpy as np, psutil
matrix = np.ones((128, 1536), dtype=np.float32)
matrix @ matrix.T
print(psutil.Process().num_threads())
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="numpy has one thread anyway")
@pytest.mark.parametrize(("configured", "threads"), [(None, 1), ("2", 2)])
def test_linear_algebra_has_one_thread_unless_the_environment_says_otherwise(
    configured: str | None, threads: int
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    if configured is not None:
        environment["OPENBLAS_NUM_THREADS"] = configured
    done = subprocess.run(
        [sys.executable, "-c", THREADS_AFTER_A_PRODUCT], env=environment, capture_output=True, text=True, check=True
    )
    assert int(done.stdout.split()[-1]) == threads
