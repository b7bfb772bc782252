"""Reading untrusted files."""

import json
import os
import pathlib

import pytest

from purecompose._support.files import is_nested_deeper, opened, read_whole


def test_files_that_are_not_regular_are_refused_without_waiting(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "zero", "link"):
        with pytest.raises(OSError, match="not a regular file"), opened(tmp_path / name):
            pass


def test_a_link_to_a_regular_file_is_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_whole(tmp_path / "link", 3) == b"abc"
    with pytest.raises(OSError, match="larger than the 2 bytes"):
        read_whole(tmp_path / "file", 2)


def test_depth_is_that_of_lists_and_dicts() -> None:
    assert not is_nested_deeper({"a": [1, 2]}, 2)
    assert is_nested_deeper({"a": [1, 2]}, 1)
    assert is_nested_deeper(json.loads("[" * 900 + "]" * 900), 64)
