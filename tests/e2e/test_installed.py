"""The wheel installs the library by a name of its own, beside any other package that is called commons."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.e2e.torchrun import ENVIRONMENT, REPOSITORY
from tests.examples.programs import source
from tests.process_pool import free_port
from tests.rank_server import forked_python

FOREIGN = "Another project's package."


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds, and a foreign commons."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    shutil.copytree(REPOSITORY / "commons", source / "commons", ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*build, "--wheel-dir", source, source], check=True, timeout=240)
    (wheel,) = source.glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "commons").mkdir()
    (site / "commons" / "__init__.py").write_text(f'"""{FOREIGN}"""\n')
    return site


def test_every_package_is_installed(site):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    folders = {path.parent for path in (REPOSITORY / "commons").rglob("__init__.py")}
    names = {".".join(("workload_balancer", *each.relative_to(REPOSITORY).parts[1:])) for each in folders}
    assert set(project["tool"]["setuptools"]["packages"]) == names
    installed = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert installed == {"workload_balancer", "commons"}
    assert (site / "workload_balancer" / "advisor" / "page.html").exists()


def test_two_ranks_exchange_batches_beside_a_foreign_commons(site, tmp_path):
    program = source("bert4rec").replace("while True:", "for _ in range(3):")
    program = program.replace("MaskedShuffler(),", 'MaskedShuffler(partitioner="karmarkar_karp"),')
    (tmp_path / "program.py").write_text(program)  # with the partitioner that compiles least
    shutil.copy(REPOSITORY / "tests" / "e2e" / "forked_ranks.py", tmp_path)
    ran = subprocess.run(
        [*forked_python(fresh=True), str(tmp_path / "forked_ranks.py"), str(free_port()), str(REPOSITORY)],
        cwd=tmp_path,
        env=ENVIRONMENT | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    *losses, exit_codes, foreign, refused = ran.stdout.splitlines() or [ran.stderr]
    assert len(losses) == 3 and all(line.startswith("loss ") for line in losses), ran.stderr
    assert "terminate called" not in ran.stderr  # a program may leave while the next step is planned
    assert exit_codes == "[0, 0]" and foreign == FOREIGN
    assert refused.startswith("ImportError: this process has imported the library as workload_balancer")
