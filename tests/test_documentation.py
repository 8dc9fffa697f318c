"""Every public name explains itself by example, and no text is tied to one machine."""

import inspect
import re
import subprocess
from pathlib import Path

import pytest

import vernal.core

ROOT = Path(__file__).parents[1]

PUBLIC = sorted(
    name
    for name, value in vars(vernal.core).items()
    if not name.startswith("_") and not inspect.ismodule(value)
)

# Written with a class of one letter so that this file does not match itself.
TIED_TO_A_MACHINE = re.compile(
    r"(?<![\w.~$})])/(?:root|home|work|opt|tm[p])/\w"
    r"|p[y]pi\.org|p[y]thonhosted|n[p]mjs\.|d[e]b\.debian"
)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_has_an_example_or_a_word_for_every_field(name):
    value = getattr(vernal.core, name)
    documentation = inspect.getdoc(value) or ""
    if is_record(value):
        assert all(f"    {field}: " in documentation for field in value._fields)
    else:
        assert "Example" in documentation
        assert ">>>" in documentation


def is_record(value):
    """A plain group of arrays: its fields want a word each, the functions show it in use."""
    return hasattr(value, "_fields") and not any(
        inspect.isfunction(member) and not name.startswith("_")
        for name, member in vars(value).items()
    )


def test_architecture_page_lists_every_public_name():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert {name for name in PUBLIC if f"`{name}`" not in page} == set()


def test_text_names_no_absolute_path_and_no_package_index():
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = []
    for name in filter(None, listing.split("\0")):
        path = ROOT / name
        if not path.is_file() or path.is_symlink():
            continue
        text = path.read_bytes().decode("utf-8", errors="ignore")
        found += [f"{name}: {match[0]}" for match in TIED_TO_A_MACHINE.finditer(text)]
    assert not found
