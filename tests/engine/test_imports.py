"""Something is done once a module has been imported."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dtorch.core.imports import after_import


def test_after_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_late.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    finders, seen = list(sys.meta_path), []
    after_import("imported_late", lambda: seen.append(sys.modules["imported_late"].value))
    after_import("imported_late", lambda: seen.append("second"))
    assert find_spec("imported_late") is not None
    assert seen == [], "looking for a module does not import it"
    importlib.import_module("imported_late")
    assert sorted(map(str, seen)) == ["1", "second"]
    assert sys.meta_path == finders
    after_import("imported_late", lambda: seen.append("at once"))
    assert seen[-1] == "at once"


def test_a_module_that_fails_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_badly.py").write_text("raise ValueError('its own')")
    monkeypatch.syspath_prepend(tmp_path)
    finders, seen = list(sys.meta_path), []
    after_import("imported_badly", lambda: seen.append(1))
    with pytest.raises(ValueError, match="its own"):
        importlib.import_module("imported_badly")
    assert seen == []
    (tmp_path / "imported_badly.py").write_text("value = 'mended'")
    importlib.invalidate_caches()
    importlib.import_module("imported_badly")
    assert seen == [1]
    assert sys.meta_path == finders
