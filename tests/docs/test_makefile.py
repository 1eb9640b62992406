"""`make` alone lists the targets, and does nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess

from tests.docs.pages import REPOSITORY


def test_make_alone_lists_every_target_and_writes_nothing(tmp_path):
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    printed = [
        subprocess.run(["make", *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for words in ([], ["help"])
    ]
    assert printed[0] == printed[1]
    assert [path.name for path in tmp_path.iterdir()] == ["Makefile"]
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    listed = dict(re.findall(r"^  ([a-z-]+) +(\S.*)$", printed[0], re.MULTILINE))
    assert listed.keys() == targets, listed
    assert "minutes" in listed["demo"]
