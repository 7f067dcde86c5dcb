from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cosmos_worker.grpo import vocab

printable = st.text(st.characters(min_codepoint=32, max_codepoint=126))


@given(printable)
def test_an_answer_decodes_to_itself(text: str) -> None:
    tokens = vocab.encode_answer(text)

    assert vocab.decode(tokens) == text
    assert vocab.is_completion(tokens)


@given(st.text())
def test_any_prompt_takes_one_token_per_character_and_two_marks(prompt: str) -> None:
    tokens = vocab.encode_prompt(prompt)

    assert len(tokens) == len(prompt) + 2
    assert all(0 <= token < vocab.VOCAB_SIZE for token in tokens)


def test_a_character_outside_the_vocabulary_is_unknown() -> None:
    assert vocab.encode("aé\n") == [*vocab.encode("a"), vocab.UNKNOWN, vocab.UNKNOWN]


def test_what_the_policy_cannot_sample_is_no_completion() -> None:
    a = vocab.encode("a")[0]

    assert vocab.is_completion([a, a])
    assert not vocab.is_completion([])
    assert not vocab.is_completion([vocab.END, a])
    assert not vocab.is_completion([vocab.UNKNOWN])
    assert not vocab.is_completion([vocab.VOCAB_SIZE])
    assert not vocab.is_completion([-1])
