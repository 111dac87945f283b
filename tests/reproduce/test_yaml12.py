"""YAML 1.2: what is a number, what is text, what is refused."""

import math

import pytest

from reproduce.errors import ConfigurationError
from reproduce.yaml12 import load_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E+3", 1000.0),
        (".5", 0.5),
        ("2.", 2.0),
        ("-3", -3),
        ("0x1F", 31),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("on", "on"),
        ("no", "no"),
        ("yes", "yes"),
        ("1_000", "1_000"),
        ("017", "017"),
        ("12:30:00", "12:30:00"),
        ("2001-01-01", "2001-01-01"),
        ("1e", "1e"),
        ("0x", "0x"),
        ("\uff11", "\uff11"),
    ],
)
def test_plain_scalars(text, value):
    loaded = load_yaml(f"key: {text}\n", "file")["key"]
    assert loaded == value
    assert type(loaded) is type(value)


def test_infinity_and_nan_are_numbers():
    assert load_yaml("-.inf", "file") == -math.inf
    assert math.isnan(load_yaml(".nan", "file"))


def test_a_version_directive_changes_nothing():
    assert load_yaml("%YAML 1.1\n---\nkey: yes\n", "file") == {"key": "yes"}


def test_merge_keys_do_nothing():
    assert load_yaml("<<: {a: 1}\n", "file") == {"<<": {"a": 1}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: the key 'a' stands here for the second time"),
        ("a: [1, 2\n", "line 2"),
        ("\ta: 1\n", "line 1, column 1"),
        ("a: !!python/object:os.system x\n", "line 1, column 4"),
        ("a: 1\n---\nb: 2\n", "another document"),
        ("a: b: c\n", "line 1"),
        ("a: \x07\n", "file"),
        ("[" * 5000, "file"),
    ],
)
def test_what_is_refused_says_where(text, says):
    with pytest.raises(ConfigurationError) as caught:
        load_yaml(text, "file")
    assert says in str(caught.value)
    assert str(caught.value).startswith("file")
