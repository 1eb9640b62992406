"""The wheel installs the library by a name of its own, beside any other package that is called commons."""

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.e2e.torchrun import ENVIRONMENT, REPOSITORY
from tests.examples.programs import source
from tests.process_pool import free_port
from tests.rank_server import forked_python

FOREIGN = "Another project's package."
IN_A_CHECKOUT = ("datasets", "training", "unbounded_ids")  # our trainer, its data sets, and its id tables


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


def test_the_wheel_holds_the_library_alone(site):
    modules = {path.relative_to(REPOSITORY / "commons") for path in (REPOSITORY / "commons").rglob("*.py")}
    of_library = {path for path in modules if path.parts[0] not in IN_A_CHECKOUT}
    assert all(any(path.parts[0] == package for path in modules) for package in IN_A_CHECKOUT)
    files = {path.relative_to(site / "workload_balancer") for path in site.glob("workload_balancer/**/*.*")}
    assert files == of_library | {Path("py.typed"), Path("advisor/page.html")}
    installed = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert installed == {"workload_balancer", "commons"}


IMPORT_ALL = """
import importlib, pkgutil, workload_balancer as library
for module in pkgutil.walk_packages(library.__path__, "workload_balancer."):
    importlib.import_module(module.name)
"""


def test_all_of_the_wheel_imports_and_the_advisor_says_where_gin_files_are_read(site, tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess:
        given = {"cwd": tmp_path, "env": ENVIRONMENT | {"PYTHONPATH": str(site)}, "timeout": 120}
        return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **given)

    imported = run("-c", IMPORT_ALL)
    assert imported.returncode == 0, imported.stderr
    refused = run("-m", "workload_balancer.advisor", "model.gin")
    assert refused.returncode == 2
    assert "model.gin configures a model of the checkout" in refused.stderr, refused.stderr


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
