"""A prompts file: each line one prompt, each key one prompt, another file another fingerprint."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_ctrl.prompts import read_prompts


def write(path, lines):
    path.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    return path


@pytest.fixture
def file(tmp_path):
    return tmp_path / "prompts.jsonl"


def test_each_line_is_a_prompt_given_as_it_is(file):
    lines = [{"prompt": "1+1", "answer": "2", "source": "sums"}, {"prompt": "2+2", "key": "mine", "nested": {"x": [1]}}]
    first, second = read_prompts(write(file, lines)).prompts
    assert json.loads(first.payload) == lines[0]
    assert (first.source, first.codec) == ("sums", "json")
    assert (second.key, second.source) == ("mine", "")
    assert json.loads(second.payload) == lines[1]


def test_empty_lines_and_line_ends_do_not_count(file):
    lines = [{"prompt": "a"}, {"prompt": "b"}]
    plain = read_prompts(write(file, lines))
    spaced = b'\n  \n{"prompt": "a"}\r\n\r\n{"prompt": "b"}'
    again = read_prompts(write(file, [spaced]))
    assert again.fingerprint == plain.fingerprint
    assert [prompt.key for prompt in again.prompts] == [prompt.key for prompt in plain.prompts]


def test_equal_prompts_have_keys_of_their_own(file):
    keys = [prompt.key for prompt in read_prompts(write(file, [{"prompt": "same"}] * 3)).prompts]
    assert len(set(keys)) == 3
    assert keys[1:] == [f"{keys[0]}#2", f"{keys[0]}#3"]


@given(st.lists(st.sampled_from(["a", "a#2", "a#2#2", "a#3", "b", ""]), min_size=1, max_size=12))
def test_every_key_names_one_prompt_whatever_the_lines_call_themselves(tmp_path_factory, keys):
    file = tmp_path_factory.getbasetemp() / "keys.jsonl"
    lines = [{"prompt": str(number % 2), "key": key} for number, key in enumerate(keys)]
    prompts = read_prompts(write(file, lines)).prompts
    assert len({prompt.key for prompt in prompts}) == len(keys)
    assert [prompt.key for prompt in read_prompts(file).prompts] == [prompt.key for prompt in prompts]


def test_the_key_of_a_prompt_does_not_depend_on_its_place_or_its_other_fields(file):
    (alone,) = read_prompts(write(file, [{"prompt": "x"}])).prompts
    (_, moved) = read_prompts(write(file, [{"prompt": "y"}, {"prompt": "x", "answer": "1"}])).prompts
    assert alone.key == moved.key


def test_a_shorter_longer_permuted_or_changed_file_is_another(file):
    lines = [{"prompt": str(number)} for number in range(4)]
    changed = [lines, lines[:-1], [*lines, {"prompt": "4"}], lines[::-1], [*lines[:-1], {"prompt": "3", "answer": "x"}]]
    prints = {read_prompts(write(file, variant)).fingerprint for variant in changed}
    assert len(prints) == len(changed)
    assert all(fingerprint.startswith("sha256:") for fingerprint in prints)


@pytest.mark.parametrize(
    "line",
    [
        b"not json\n",
        b'{"prompt": \n',
        b"[]\n",
        b'"prompt"\n',
        b"{}\n",
        b'{"prompt": 5}\n',
        b'{"prompt": null}\n',
        b'{"prompt": "x", "key": 7}\n',
        b'{"prompt": "x", "source": ["y"]}\n',
        b'{"prompt": "\xff"}\n',
        b'{"prompt": "\\ud800"}\n',
        b'{"prompt": "x", "key": "\\udfff"}\n',
        b'{"prompt": "x", "source": "\\udfff"}\n',
    ],
    ids=repr,
)
def test_a_wrong_line_is_named_with_file_and_number(file, line):
    with pytest.raises(ValueError, match=rf"{file.name}:3: "):
        read_prompts(write(file, [{"prompt": "good"}, b"\n", line]))


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_a_file_without_prompts_is_refused(file, content):
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(write(file, [content]))


def test_a_file_that_is_not_there_is_the_systems_own_error(file):
    with pytest.raises(FileNotFoundError):
        read_prompts(file)
