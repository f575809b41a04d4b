"""Constructors and files that refuse what they do not know, by name."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline

from lattn_compile.errors import FileFormatError, PolicyError
from lattn_compile.strict import read_json, strict, write_json


@strict(PolicyError)
@dataclasses.dataclass(frozen=True)
class Sample:
    first: int
    _: dataclasses.KW_ONLY
    second: str = "b"


def text_of(call: Any) -> str:
    with pytest.raises(PolicyError) as caught:
        call()
    return str(caught.value)


def test_a_wrong_call_names_the_key_the_known_keys_and_the_nearest_one() -> None:
    assert_expected_inline(
        text_of(lambda: Sample(1, secnd="x")),  # type: ignore[call-arg]
        """\
[policy] secnd: got an unknown key of Sample; want one of first, second. Remove it or correct its name. \
Did you mean 'second'?""",
    )
    assert_expected_inline(
        text_of(lambda: Sample(1, "x")),  # type: ignore[misc]
        """\
[policy] Sample: got 2 positional arguments; want only first by position. Name the others, as in Sample(second=...).""",
    )
    assert_expected_inline(
        text_of(lambda: Sample(second="x")),  # type: ignore[call-arg]
        """[policy] first: got Sample without it; want a value: it has no default. Write Sample(first=...).""",
    )
    assert_expected_inline(
        text_of(lambda: Sample(1, first=2)),  # type: ignore[misc]
        """[policy] first: got Sample with first by position and by name; want it once. Drop one of the two.""",
    )


def test_replace_goes_through_the_same_door() -> None:
    assert dataclasses.replace(Sample(1), second="c") == Sample(1, second="c")
    assert "unknown key" in text_of(lambda: dataclasses.replace(Sample(1), third=3))


def test_the_signature_stays_readable() -> None:
    assert list(inspect.signature(Sample).parameters) == ["first", "second"]


def test_json_comes_back_as_it_was_written_and_no_part_is_left(tmp_path: Path) -> None:
    data = {"a": [1, None, "ä"], "b": {"c": 1.5}}
    write_json(tmp_path / "x.json", data)
    assert read_json(tmp_path / "x.json") == data
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"old": 1})

    def disk_full(self: Path, text: str, **_: Any) -> None:
        self.write_bytes(text.encode()[: len(text) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(FileFormatError, match="No space left on device"):
        patch.setattr(Path, "write_text", disk_full)
        write_json(path, {"new": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    for bad in ({"nan": float("nan")}, {"object": object()}):
        with pytest.raises((ValueError, TypeError)):
            write_json(path, bad)
    assert read_json(path) == {"old": 1}
    with pytest.raises(FileFormatError, match="No such file or directory"):
        write_json(tmp_path / "missing" / "x.json", {})


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{", "which is not JSON"),
        (b"\xff\xfe", "which is not JSON"),
        (b'{"a": 1, "a": 2}', "'a' stands twice"),
        (b'{"a": {"b": 1, "b": 1}}', "'b' stands twice"),
        (b'{"a": NaN}', "NaN stands"),
        (b"[" * 100_000, "which is not JSON"),
    ],
)
def test_what_json_lets_pass_in_silence_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=complaint):
        read_json(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError) as caught:
        read_json(tmp_path / "none.json")
    text = str(caught.value).replace(str(tmp_path), "TMP")
    assert_expected_inline(
        text,
        """\
[file] path: got 'TMP/none.json', which cannot be read; want a JSON file. No such file or directory.""",
    )
