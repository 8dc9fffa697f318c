"""The wheel that users get: what is in it, and that it works where nothing else of ours is."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def output_of(*command: str | Path, folder: Path) -> str:
    """What a command prints; its errors fail the test."""
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a source distribution, as a package index would serve them."""
    folder = tmp_path_factory.mktemp("dist")
    output_of(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, folder=ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """The programs of a new virtual environment that holds the wheel and our dependencies."""
    home = tmp_path_factory.mktemp("environment")
    output_of(sys.executable, "-m", "venv", "--without-pip", home, folder=home)
    programs = home / ("Scripts" if sys.platform == "win32" else "bin")
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "--quiet")
    output_of(*pip, "install", "--no-deps", "--no-index", wheel, folder=home)
    # A folder named in a .pth file is searched, but its own .pth files are not read:
    # the dependencies are seen, an editable install of the checkout is not.
    get_path = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(output_of(programs / "python", "-c", get_path, folder=home).strip())
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return programs


def test_wheel_holds_one_package_with_everything_in_it(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    wanted = {"vernal/__init__.py", "vernal/__main__.py", "vernal/py.typed"}
    for package in ("core", "adapters"):
        wanted |= {f"vernal/{path.relative_to(ROOT)}" for path in ROOT.glob(f"{package}/**/*.py")}
    packaged = {name for name in names if ".dist-info/" not in name}
    assert {name for name in packaged if name.endswith((".py", ".typed"))} == wanted
    assert {name.partition("/")[0] for name in packaged} == {"vernal"}


def test_wheel_carries_the_licence(wheel):
    assert any(name.endswith("/licenses/LICENSE") for name in zipfile.ZipFile(wheel).namelist())


def test_installed_core_computes(environment, tmp_path):
    program = """
import jax.numpy as jnp
import vernal
from vernal.core import gae

one, no = jnp.ones(2), jnp.zeros(2, bool)
print(vernal.__file__)
print(gae(one, one, 0 * one, 0 * one, no, lambda_=1.0).tolist())
"""
    place, advantages = output_of(environment / "python", "-c", program, folder=tmp_path).split(
        "\n", 1
    )
    assert Path(place).is_relative_to(environment.parent)
    assert advantages.strip() == "[2.0, 1.0]"


def test_installed_command_shows_its_help(environment, tmp_path):
    assert "train" in output_of(environment / "vernal", "--help", folder=tmp_path)
