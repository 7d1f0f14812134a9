"""What is installed: the three packages under ``twostroke``, whole, typed, licensed, with their command."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOP_LEVEL = ("fsm", "stages", "engine")
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
MODULES = sorted(path.relative_to(ROOT) for top in TOP_LEVEL for path in (ROOT / top).rglob("*.py"))
APACHE_2_0_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


@pytest.mark.parametrize("package", TOP_LEVEL)
def test_a_package_is_the_folder_of_its_name(package: str) -> None:
    module = importlib.import_module(f"twostroke.{package}")
    assert module.__file__ is not None
    assert Path(module.__file__).parent == ROOT / package


def test_twostroke_is_a_namespace() -> None:
    spec = importlib.util.find_spec("twostroke")
    assert spec is not None
    assert spec.origin is None


def test_every_folder_with_modules_is_a_listed_package() -> None:
    folders = {str(path.parent): "twostroke." + ".".join(path.parent.parts) for path in MODULES}
    setuptools = PYPROJECT["tool"]["setuptools"]
    assert sorted(setuptools["packages"]) == sorted(folders.values())
    assert setuptools["package-dir"] == {package: folder for folder, package in folders.items()}
    assert [folder for folder in folders if not (ROOT / folder / "__init__.py").is_file()] == []


def test_the_license_is_apache_2() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2_0_SHA256
    assert PROJECT["license"] == "Apache-2.0"


def test_the_command_can_be_loaded() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="twostroke")
    assert command.value == PROJECT["scripts"]["twostroke"]
    assert callable(command.load())


def test_the_changelog_knows_the_version() -> None:
    assert re.search(rf"^## \[{re.escape(PROJECT['version'])}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_every_import_is_declared() -> None:
    declared = [
        *PROJECT["dependencies"],
        *(line for extra in PROJECT["optional-dependencies"].values() for line in extra),
    ]
    names = {re.split(r"[^A-Za-z0-9._-]", line)[0].lower().replace("_", "-") for line in declared}
    # Comes with the CUDA builds of torch; on a CPU it is there for the tests of its kernels only.
    names.add("triton")
    distributions = importlib.metadata.packages_distributions()
    undeclared: set[str] = set()
    for path in MODULES:
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                imported = [node.module or ""]
            for top in {name.split(".")[0] for name in imported} - sys.stdlib_module_names - {"twostroke"}:
                if not names & {found.lower().replace("_", "-") for found in distributions.get(top, [top])}:
                    undeclared.add(f"{path}: {top}")
    assert undeclared == set()


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources and unpacked as an installer would."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    for name in TOP_LEVEL:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, target], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def test_the_wheel_has_every_module_and_is_typed(unpacked_wheel: Path) -> None:
    folders = (ROOT / "engine" / "timeline_page", ROOT / "engine" / "serve" / "page")
    pages = (path.relative_to(ROOT) for folder in folders for path in folder.iterdir())
    sources = (path.relative_to(ROOT) for path in (ROOT / "engine" / "native").glob("*.[ch]"))
    expected = {*MODULES, *pages, *sources, *(Path(package) / "py.typed" for package in TOP_LEVEL)}
    shipped = {path.relative_to(unpacked_wheel / "twostroke") for path in (unpacked_wheel / "twostroke").rglob("*.*")}
    assert shipped == expected
    assert list(unpacked_wheel.glob("*.dist-info/licenses/LICENSE")) != []


def test_the_wheel_can_be_imported(unpacked_wheel: Path) -> None:
    program = "import twostroke.fsm, twostroke.stages.io as io; print(twostroke.fsm.__file__, io.__file__, sep='\\n')"
    environment = os.environ | {"PYTHONPATH": str(unpacked_wheel), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [Path(line).is_relative_to(unpacked_wheel) for line in done.stdout.splitlines()] == [True, True]
