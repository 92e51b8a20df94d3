"""Byte-level BPE, as GPT-2 and its successors have it, built from the metadata of a GGUF file.

Text is cut into words (``_split_words``), a word's UTF-8 bytes become printable characters one
for one (``_byte_characters``), and neighbouring pieces are merged, lowest rank first, until no
merge applies. Control tokens such as ``<|im_end|>`` never come out of plain text: only
``encode_chat`` places them, so what a user types cannot end its own turn.
"""

from __future__ import annotations

import codecs
import heapq
import re
import unicodedata
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

SUPPORTED_MODEL = "gpt2"
SUPPORTED_PRE_TOKENIZER = "smollm"
DEFAULT_SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

_CONTROL = 3
_MAX_CACHED_WORD = 64
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_Item = TypeVar("_Item", int, str)

# Unicode's White_Space. Python's own \s has U+001C to U+001F too.
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
# Runs on text without numbers, where a letter is a word character that is not an underscore.
_WORD = re.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d"
    r"| ?[^\W_]+"
    rf"| ?(?:_|[^\w{_SPACE}])+"
    rf"|[{_SPACE}]+(?![^{_SPACE}])"
    rf"|[{_SPACE}]+"
)


class Message(NamedTuple):
    """One turn of a conversation: ``role`` is ``"system"``, ``"user"`` or ``"assistant"``."""

    role: str
    content: str


class TokenizerError(ValueError):
    """The metadata describe a tokenizer that is damaged or of another kind."""


class Tokenizer:
    """Encodes text to token ids and back. Immutable: threads and forks may share it.

    Args:
        tokens: The text of each token in byte characters; the index is the id.
        merges: Pairs of pieces divided by one space, the first to apply first.
        control: Ids of the tokens that are not text.
        end_of_turn: Id of the token that ends a turn and stops generation.

    Raises:
        TokenizerError: a merge is not two pieces, or an id is out of range.
    """

    def __init__(
        self, tokens: Sequence[str], merges: Iterable[str], control: Iterable[int], end_of_turn: int
    ) -> None:
        self._tokens = tuple(tokens)
        self._control = frozenset(control)
        for token in (end_of_turn, *self._control):
            if not 0 <= token < len(self._tokens):
                raise TokenizerError(f"token {token} is not one of the {len(self._tokens)} tokens")
        self.end_of_turn = end_of_turn
        self._ids = {text: token for token, text in enumerate(self._tokens) if token not in self._control}
        self._control_ids = {self._tokens[token]: token for token in sorted(self._control)}
        self._ranks: dict[tuple[str, str], int] = {}
        for rank, merge in enumerate(merges):
            left, space, right = merge.partition(" ")
            if not left or not space or not right:
                raise TokenizerError(f"merge {rank} is {merge!r}, not two pieces")
            self._ranks.setdefault((left, right), rank)
        self._cached_word = lru_cache(maxsize=1 << 15)(self._merge_word)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """Build the tokenizer that the ``tokenizer.ggml.*`` entries describe.

        Raises:
            TokenizerError: an entry is missing or has the wrong type, or the tokenizer is not
                GPT-2 style BPE with the ``smollm`` way to cut words and ChatML's tokens.
        """
        _require(metadata, "tokenizer.ggml.model", SUPPORTED_MODEL)
        _require(metadata, "tokenizer.ggml.pre", SUPPORTED_PRE_TOKENIZER)
        tokens = _list_of(metadata, "tokenizer.ggml.tokens", str)
        merges = _list_of(metadata, "tokenizer.ggml.merges", str)
        types = _list_of(metadata, "tokenizer.ggml.token_type", int)
        if len(types) != len(tokens):
            raise TokenizerError(f"{len(types)} token types for {len(tokens)} tokens")
        end_of_turn = metadata.get("tokenizer.ggml.eos_token_id")
        if not isinstance(end_of_turn, int):
            raise TokenizerError(f"tokenizer.ggml.eos_token_id is {end_of_turn!r}, not a number")
        control = [token for token, kind in enumerate(types) if kind == _CONTROL]
        tokenizer = cls(tokens, merges, control, end_of_turn)
        for name in ("<|im_start|>", "<|im_end|>"):
            tokenizer.control_id(name)
        return tokenizer

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens, control tokens included."""
        return len(self._tokens)

    def control_id(self, name: str) -> int:
        """Id of the control token spelled ``name``; TokenizerError if there is none."""
        try:
            return self._control_ids[name]
        except KeyError:
            raise TokenizerError(f"the vocabulary has no control token {name!r}") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; a control token's spelling is text like any other.

        A byte that the vocabulary has no token for is dropped: the vocabulary has one for each
        byte that text written by people contains. A lone surrogate becomes U+FFFD.
        """
        ids: list[int] = []
        for word in _split_words(_LONE_SURROGATE.sub("\ufffd", text)):
            # Long words are rare, and their memory would be without bound.
            merge = self._cached_word if len(word) <= _MAX_CACHED_WORD else self._merge_word
            ids.extend(merge(word))
        return ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation in ChatML, ending where the assistant's answer begins.

        Without a system message at its head, the conversation gets the model's own.
        """
        if not messages or messages[0].role != "system":
            messages = [Message("system", DEFAULT_SYSTEM_PROMPT), *messages]
        start, end = self.control_id("<|im_start|>"), self.control_id("<|im_end|>")
        ids: list[int] = []
        for role, content in messages:
            ids += [start, *self.encode(f"{role}\n{content}"), end, *self.encode("\n")]
        return [*ids, start, *self.encode("assistant\n")]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for; empty for a control token.

        Raises:
            ValueError: there is no such token.
        """
        if not 0 <= token < len(self._tokens):
            raise ValueError(f"token {token} is not one of the {len(self._tokens)} tokens")
        if token in self._control:
            return b""
        values = _character_bytes()
        text = self._tokens[token]
        if not all(character in values for character in text):
            return text.encode("utf-8")
        return bytes(values[character] for character in text)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of the tokens, control tokens left out; what is not UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")

    def stream(self) -> StreamDecoder:
        """A decoder for tokens that come one at a time."""
        return StreamDecoder(self)

    def _merge_word(self, word: str) -> tuple[int, ...]:
        characters = _byte_characters()
        pieces = [characters[byte] for byte in word.encode("utf-8")]
        ids: list[int] = []
        for piece in _merge(pieces, self._ranks):
            if piece in self._ids:
                ids.append(self._ids[piece])
            else:
                ids.extend(self._ids[part] for part in piece if part in self._ids)
        return tuple(ids)


class StreamDecoder:
    """Turns tokens into text as they come, holding back a character until it is whole.

    Not thread-safe: one stream has one decoder.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that is complete with this token; often empty in the middle of a character."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that never became whole."""
        return self._decoder.decode(b"", final=True)


def _split_words(text: str) -> Iterator[str]:
    """Cut text as SmolLM's pre-tokenizer does; the words joined are the text.

    First each number character (Unicode's N) stands alone, then GPT-2's pattern cuts what lies
    between: English contractions, then letters, others or spaces, one space leading a word.
    """
    start = 0
    for index, character in enumerate(text):
        if unicodedata.category(character)[0] == "N":
            yield from _WORD.findall(text[start:index])
            yield character
            start = index + 1
    yield from _WORD.findall(text[start:])


def _merge(pieces: list[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Apply merges, lowest rank first and leftmost first among equals, in n log n time."""
    count = len(pieces)
    following = list(range(1, count + 1))
    preceding = list(range(-1, count - 1))
    heap: list[tuple[int, int, str, str]] = []

    def offer(left: int) -> None:
        right = following[left]
        if right < count:
            rank = ranks.get((pieces[left], pieces[right]))
            if rank is not None:
                heapq.heappush(heap, (rank, left, pieces[left], pieces[right]))

    for left in range(count - 1):
        offer(left)
    while heap:
        _, left, left_text, right_text = heapq.heappop(heap)
        right = following[left]
        # An offer is stale once either of its pieces has been merged into something else.
        if right >= count or pieces[left] != left_text or pieces[right] != right_text:
            continue
        pieces[left] += pieces[right]
        pieces[right] = ""
        following[left] = following[right]
        if following[left] < count:
            preceding[following[left]] = left
        offer(left)
        if preceding[left] >= 0:
            offer(preceding[left])
    return [piece for piece in pieces if piece]


@lru_cache(maxsize=1)
def _byte_characters() -> tuple[str, ...]:
    """GPT-2's printable stand-in for each byte: itself where printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else chr(next(spare)) for byte in range(256))


@lru_cache(maxsize=1)
def _character_bytes() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(_byte_characters())}


def _require(metadata: Mapping[str, object], key: str, expected: str) -> None:
    if metadata.get(key) != expected:
        raise TokenizerError(f"{key} is {metadata.get(key)!r}; only {expected!r} can be read")


def _list_of(metadata: Mapping[str, object], key: str, kind: type[_Item]) -> list[_Item]:
    items = metadata.get(key)
    if not isinstance(items, list) or not all(type(item) is kind for item in items):
        raise TokenizerError(f"{key} is not an array of {kind.__name__}")
    return items
