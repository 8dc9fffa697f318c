"""Which libraries an import of `vernal` brings along, and by which names it is imported."""

import ast
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import vernal

ROOT = Path(__file__).parents[1]

NEVER = {"flax", "haiku"}
BOUND = {"chex", "equinox", "jumanji", "mctx", "optax", "orbax"}
TOOLS = {"matplotlib", "PIL", "rich", "tomli_w", "tyro"}

# Notes every attempt at an import, so that a library which is tried for but not installed counts.
WATCHED_IMPORTS = """
import importlib, json, pkgutil, sys

tried = set()

class Watch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        tried.add(name.partition(".")[0])

sys.meta_path.insert(0, Watch)
{statement}
print(json.dumps(sorted(tried)))
"""

ALL_ADAPTERS = """
import vernal.adapters
for module in pkgutil.walk_packages(vernal.adapters.__path__, "vernal.adapters."):
    importlib.import_module(module.name)
"""


def libraries_tried_by(statement: str, folder: Path) -> set[str]:
    """The top-level names that a fresh interpreter looks for while it runs `statement`."""
    program = WATCHED_IMPORTS.format(statement=statement)
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import vernal", NEVER | BOUND | TOOLS | {"jax", "numpy"}),
        ("import vernal.core", NEVER | BOUND | TOOLS),
        ("import vernal.adapters", NEVER | BOUND | TOOLS),
        (ALL_ADAPTERS, NEVER),
    ],
    ids=["vernal", "core", "adapters", "every-adapter"],
)
def test_import_brings_no_unwanted_library(statement, unwanted, tmp_path):
    assert not libraries_tried_by(statement, tmp_path) & unwanted


@pytest.mark.parametrize("path", sorted(ROOT.glob("core/**/*.py")), ids=lambda p: p.name)
def test_core_module_names_only_the_libraries_of_core(path):
    allowed = sys.stdlib_module_names | {"beartype", "jax", "jaxtyping", "numpy"}
    named = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            named.add(str(node.module).partition(".")[0])
    assert named <= allowed


def test_packages_are_not_imported_under_their_bare_names():
    # A second copy of each class would fail every isinstance and every tree comparison.
    assert not {"core", "adapters"} & set(sys.modules)


def test_version_is_that_of_the_installed_distribution():
    assert vernal.__version__ == version("vernal")
