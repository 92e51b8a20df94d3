"""Byte-level BPE on small vocabularies made here."""

from __future__ import annotations

import itertools
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpler.models.tokenizer import (
    DEFAULT_SYSTEM_PROMPT,
    Message,
    Tokenizer,
    TokenizerError,
    _byte_characters,
    _merge,
    _split_words,
)

START, END = 256, 257
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "Ã ©")
plain_text = st.text(st.characters(codec="utf-8"))


def byte_tokenizer(merges: tuple[str, ...] = MERGES) -> Tokenizer:
    tokens = [*_byte_characters(), "<|im_start|>", "<|im_end|>"]
    tokens += [merge.replace(" ", "") for merge in merges]
    return Tokenizer(tokens, merges, control=(START, END), end_of_turn=END)


def texts(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in tokenizer.encode(text)]


@given(plain_text)
def test_decoding_gives_the_encoded_text_back(text: str) -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(st.sampled_from("a Z1é٣_-'s\t\n \x1c世😀́Ⅷ½")))
def test_the_words_of_a_text_joined_are_the_text(text: str) -> None:
    assert "".join(_split_words(text)) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello world", ["Hello", " world"]),
        ("I'm we'll they'RE", ["I", "'m", " we", "'ll", " they", "'", "RE"]),
        ("in 2024, x2", ["in", " ", "2", "0", "2", "4", ",", " x", "2"]),
        ("a  b", ["a", " ", " b"]),
        ("a  1", ["a", "  ", "1"]),
        ("end  ", ["end", "  "]),
        ("x \n\n y", ["x", " \n\n", " y"]),
        ("snake_case __init__", ["snake", "_", "case", " __", "init", "__"]),
        ("naïve 世界!? ½Ⅷ", ["naïve", " 世界", "!?", " ", "½", "Ⅷ"]),
        ("a\u3000\u3000b\x1cc", ["a", "\u3000", "\u3000", "b", "\x1c", "c"]),
        ("", []),
    ],
)
def test_words_are_cut_as_the_pattern_says(text: str, words: list[str]) -> None:
    assert list(_split_words(text)) == words


def test_each_character_counts_as_letter_number_space_or_other_by_its_unicode_category() -> None:
    white_space = {*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B)}
    white_space |= {0x2028, 0x2029, 0x202F, 0x205F, 0x3000}
    wrong = []
    for code in range(0x32400):  # above are only unassigned, private and tag characters
        character = chr(code)
        category = unicodedata.category(character)[0]
        if category == "N":
            expected = ["a", character, "-"]
        elif category == "L":
            expected = ["a" + character, "-"]
        elif code in white_space:
            expected = ["a", " -"] if character == " " else ["a", character, "-"]
        else:
            expected = ["a", character + "-"]
        if list(_split_words(f"a{character}-")) != expected:
            wrong.append(hex(code))
    assert not wrong


def naive_merge(pieces: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    while True:
        found = [(ranks[pair], at) for at, pair in enumerate(itertools.pairwise(pieces)) if pair in ranks]
        if not found:
            return pieces
        _, at = min(found)
        pieces = [*pieces[:at], pieces[at] + pieces[at + 1], *pieces[at + 2 :]]


pieces_of_ab = st.text("ab", min_size=1, max_size=3)


@given(st.text("ab", max_size=24), st.lists(st.tuples(pieces_of_ab, pieces_of_ab), unique=True))
def test_merging_gives_what_the_quadratic_algorithm_gives(word: str, pairs: list[tuple[str, str]]) -> None:
    ranks = {pair: rank for rank, pair in enumerate(pairs)}
    assert _merge(list(word), ranks) == naive_merge(list(word), ranks)


def test_a_long_word_is_encoded_without_quadratic_work() -> None:
    assert byte_tokenizer().encode("hello" * 20_000) == [256 + 5] * 20_000


def test_merges_apply_by_rank() -> None:
    assert texts(byte_tokenizer(), "hello world") == ["hello", " wo", "r", "l", "d"]


def test_a_control_token_spelled_in_text_stays_text() -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode("<|im_end|>")
    assert END not in tokens
    assert tokenizer.decode(tokens) == "<|im_end|>"


def test_a_chat_is_chatml_with_the_models_own_system_prompt() -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode_chat([Message("user", "hi <|im_end|>")])
    assert tokens.count(START) == 3
    assert tokens.count(END) == 2
    assert tokenizer.decode(tokens) == (f"system\n{DEFAULT_SYSTEM_PROMPT}\nuser\nhi <|im_end|>\nassistant\n")


def test_a_system_message_replaces_the_models_own() -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode_chat([Message("system", "s"), Message("user", "u")])
    assert tokenizer.decode(tokens) == "system\ns\nuser\nu\nassistant\n"


def test_a_byte_without_a_token_is_dropped() -> None:
    tokenizer = Tokenizer(["a", "b"], [], control=(), end_of_turn=0)
    assert tokenizer.encode("acb") == [0, 1]


def test_a_lone_surrogate_becomes_the_replacement_character() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


@given(plain_text)
def test_a_stream_gives_the_same_text_token_by_token(text: str) -> None:
    tokenizer = byte_tokenizer()
    stream = tokenizer.stream()
    pushed = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(pushed) + stream.finish() == text


def test_a_stream_holds_a_character_back_until_it_is_whole() -> None:
    tokenizer = byte_tokenizer()
    stream = tokenizer.stream()
    assert [stream.push(token) for token in "😀".encode()] == ["", "", "", "😀"]
    assert stream.push(0xF0) == ""
    assert stream.push(END) == ""
    assert stream.finish() == "\ufffd"


def test_decoding_an_unknown_token_names_it() -> None:
    with pytest.raises(ValueError, match="token 264 is not one of the 264 tokens"):
        byte_tokenizer(MERGES[:6]).decode([264])


def metadata(**changes: object) -> dict[str, object]:
    entries: dict[str, object] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": ["a", "b", "ab", "<|im_start|>", "<|im_end|>"],
        "merges": ["a b"],
        "token_type": [1, 1, 1, 3, 3],
        "eos_token_id": 4,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (entries | changes).items()}


def test_the_metadata_of_a_file_make_a_tokenizer() -> None:
    tokenizer = Tokenizer.from_metadata(metadata())
    assert tokenizer.encode("aba") == [2, 0]
    assert tokenizer.end_of_turn == 4
    assert tokenizer.vocabulary_size == 5


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": "llama"}, "only 'gpt2'"),
        ({"pre": None}, "only 'smollm'"),
        ({"tokens": "abc"}, "tokens is not an array of str"),
        ({"tokens": ["a", 1, "c", "d", "e"]}, "tokens is not an array of str"),
        ({"token_type": [1]}, "1 token types for 5 tokens"),
        ({"token_type": [1, 1, 1, 3, 1]}, r"no control token '<\|im_end\|>'"),
        ({"merges": ["ab"]}, "merge 0 is 'ab'"),
        ({"merges": ["a b", " b"]}, "merge 1 is ' b'"),
        ({"eos_token_id": 5}, "token 5 is not one of the 5"),
        ({"eos_token_id": None}, "eos_token_id is None"),
    ],
)
def test_damaged_metadata_are_refused_by_name(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(TokenizerError, match=expected):
        Tokenizer.from_metadata(metadata(**changes))
