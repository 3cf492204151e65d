from __future__ import annotations

from pathlib import Path

import pytest

from services.policy_trainer.tinker.keys import ClientKeys, make
from shared.topology.serve import KeysError, read_keys

GOOD = "one tml-0123456789abcdef0123\n\n# a comment\ntwo tml-abcdef0123456789abcd\n"


def written(folder: Path, text: str, mode: int = 0o600) -> str:
    file = folder / "keys"
    file.write_text(text)
    file.chmod(mode)
    return str(file)


def test_a_key_is_known_by_its_name(tmp_path: Path) -> None:
    keys = ClientKeys(written(tmp_path, GOOD))
    assert keys.name_of("tml-abcdef0123456789abcd") == "two"
    assert keys.name_of("tml-abcdef0123456789abce") is None
    assert keys.name_of("") is None


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (GOOD, 0o644, "chmod 600"),
        ("one\n", 0o600, ":1: 1 words instead of 2"),
        ("one key-0123456789abcdef0123\n", 0o600, "must begin with tml-"),
        ("one tml-0\n", 0o600, "20 ASCII characters"),
        ("one tml-0123456789abcdef0123\none tml-abcdef0123456789abcd\n", 0o600, ":2: the name of one occurs twice"),
        ("one tml-0123456789abcdef0123\ntwo tml-0123456789abcdef0123\n", 0o600, ":2: the key of two occurs twice"),
        ("# nothing\n", 0o600, "no key in it"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_is_refused_by_line(text: str, mode: int, says: str, tmp_path: Path) -> None:
    with pytest.raises(KeysError, match=says):
        read_keys(written(tmp_path, text, mode))


def test_a_key_is_made_once_and_is_its_owners_only(tmp_path: Path) -> None:
    file = make(tmp_path)
    first = read_keys(file)
    assert read_keys(make(tmp_path)) == first
    assert Path(file).stat().st_mode & 0o777 == 0o600
