"""A file that is written appears whole; a failure leaves the older one, and nothing beside it."""

import os
from pathlib import Path

import pytest

from csa2_compiled.whole_file import whole_file


def test_the_file_is_there_at_the_end_of_the_block(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    for content in ("older", "newer"):
        before = path.read_text() if path.exists() else None
        with whole_file(path) as partial:
            partial.write_text(content)
            assert (path.read_text() if path.exists() else None) == before
        assert path.read_text() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("older")

    def write_half() -> None:
        with whole_file(path) as partial:
            partial.write_text("new")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_half()
    with pytest.raises(FileNotFoundError), whole_file(path):
        pass  # nothing is written
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_take_its_place_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file.txt"
    path.write_text("older")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"), whole_file(path) as partial:
        partial.write_text("newer")
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]
