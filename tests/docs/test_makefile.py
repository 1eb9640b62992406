"""`make` alone lists the targets and what `make bench` measures, and does nothing else."""

import re
import shutil
import subprocess

from benchmarks.harness import BENCHMARKS
from tests.docs.pages import REPOSITORY


def test_make_alone_lists_every_target_and_writes_nothing(tmp_path):
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    printed, *others = [
        subprocess.run(["make", *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for words in ([], ["help"], ["bench"])
    ]
    assert others == [printed] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["Makefile"]
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    of_targets, of_benchmarks = (
        dict(re.findall(r"^  ([a-z-]+) +(\S.*)$", part, re.MULTILINE)) for part in printed.split("NAME=...")
    )
    assert of_targets.keys() == targets, of_targets
    assert "minutes" in of_targets["demo"]
    assert of_benchmarks.keys() == BENCHMARKS.keys()
