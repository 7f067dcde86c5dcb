"""The character vocabulary: five marks and the 95 printable ASCII characters.

- A prompt becomes `begin, characters, separator`; a completion is characters and, when it ended by itself, `end`.
- A character outside the vocabulary becomes the unknown mark: any prompt can be read, not every one told apart.
- The policy never samples a mark other than `end`, so a completion decodes to exactly its characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

PAD, BEGIN, END, SEPARATOR, UNKNOWN = range(5)
_CHARACTERS = "".join(chr(code) for code in range(32, 127))
_FIRST = UNKNOWN + 1
_ID_OF = {character: _FIRST + index for index, character in enumerate(_CHARACTERS)}

VOCAB_SIZE = _FIRST + len(_CHARACTERS)
NEVER_SAMPLED = (PAD, BEGIN, SEPARATOR, UNKNOWN)


def encode(text: str) -> list[int]:
    """One id per character of `text`."""
    return [_ID_OF.get(character, UNKNOWN) for character in text]


def encode_prompt(prompt: str) -> list[int]:
    """Ids that stand before a completion: `len(prompt) + 2` of them."""
    return [BEGIN, *encode(prompt), SEPARATOR]


def encode_answer(answer: str) -> list[int]:
    """Ids of a whole completion that ends after `answer`."""
    return [*encode(answer), END]


def decode(tokens: Iterable[int]) -> str:
    """The characters of a completion; marks have none."""
    return "".join(_CHARACTERS[token - _FIRST] for token in tokens if token >= _FIRST)


def is_completion(tokens: Sequence[int]) -> bool:
    """Whether the policy could have sampled `tokens`: characters, and `end` nowhere but last."""
    return len(tokens) > 0 and all(
        _FIRST <= token < VOCAB_SIZE or (token == END and place == len(tokens) - 1)
        for place, token in enumerate(tokens)
    )
