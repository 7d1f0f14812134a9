"""Tokenizers from folders and GGUF metadata, and text that arrives token by token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from twostroke.engine.loading.gguf_file import GGUFFile
from twostroke.engine.loading.sources import packaged_file
from twostroke.engine.tokenizer import IncrementalDetokenizer, Tokenizer, TokenizerError

SPACE = "\u2581"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXTS = [
    "naïve café 12345 x2",
    "日本語のテキスト",
    "👩‍👩‍👧‍👦🏳️‍🌈 ok",
    "a\n\n  b\t c",
    "don't we'll",
    "ffi ﬃ Å",
    "\x00\x7f",
    "",
]


def streamed(
    tokenizer: Tokenizer, ids: Sequence[int], *, prompt: Sequence[int] = (), skip_special_tokens: bool = True
) -> list[str]:
    """What each token shows, and at last the rest."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.append([token]) for token in ids), detokenizer.flush()]


def byte_level_metadata(pre: str = "gpt-2", **extra: Any) -> dict[str, Any]:
    """A byte-level vocabulary: every byte, a few merges, one control and one user-defined token."""
    merges = ["h e", "l l", "he ll", "Ġ w", "1 2", "12 3"]
    tokens = ["<s>", "</s>", "<tool>", *BYTES, *(merge.replace(" ", "") for merge in merges)]
    types = [TokenType.CONTROL] * 2 + [TokenType.USER_DEFINED] + [TokenType.NORMAL] * (len(tokens) - 3)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    } | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}


def sentencepiece_metadata(**extra: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary with byte fallback, as llama's: pieces with scores, no merges."""
    pieces = [SPACE, "h", "e", "l", "o", f"{SPACE}h", "el", "lo", f"{SPACE}hel", f"{SPACE}hello", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(pieces)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}


BYTE_LEVEL = Tokenizer.from_gguf(byte_level_metadata())
SENTENCEPIECE = Tokenizer.from_gguf(sentencepiece_metadata())


def pieces_of(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.id_to_token(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def test_byte_level_round_trip() -> None:
    assert pieces_of(BYTE_LEVEL, "hell w") == ["hell", "Ġw"]
    assert (BYTE_LEVEL.bos_token_id, BYTE_LEVEL.eos_token_id) == (0, 1)
    assert BYTE_LEVEL.special_token_ids == {0, 1}
    for text in TEXTS:
        assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte_level", "sentencepiece"])
def test_a_long_text_is_tokenized_as_a_short_one(tokenizer: Tokenizer) -> None:
    text = "hello hell w 123\n" * 400  # long enough for the way that lets other threads run
    for special in (True, False):
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert ids == tokenizer.backend.encode(text, add_special_tokens=special).ids


def test_control_tokens_are_skipped_and_user_defined_ones_are_not() -> None:
    ids = BYTE_LEVEL.encode("<s>he<tool></s>")
    assert ids == [0, BYTE_LEVEL.token_to_id("he"), 2, 1]
    assert BYTE_LEVEL.decode(ids) == "he<tool>"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "<s>he<tool></s>"
    assert "".join(streamed(BYTE_LEVEL, ids)) == "he<tool>"
    assert "".join(streamed(BYTE_LEVEL, ids, skip_special_tokens=False)) == "<s>he<tool></s>"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["123", "45", "Ġ", "Ġw", "'", "L", "L", "!", "Ċ"]),
        ("smollm", ["1", "2", "3", "4", "5", "Ġ", "Ġw", "'", "L", "L", "!", "Ċ"]),
        ("default", ["123", "4", "5", "Ġ", "Ġw", "'", "L", "L", "!", "Ċ"]),
        ("llama-bpe", ["123", "4", "5", "Ġ", "Ġw", "'", "L", "L", "!", "Ċ"]),
        ("qwen2", ["1", "2", "3", "4", "5", "Ġ", "Ġw", "'", "L", "L", "!", "Ċ"]),
    ],
)
def test_pre_tokenizers(pre: str, words: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre))
    expected = [piece for word in words for piece in (["4", "5"] if word == "45" else [word])]
    assert pieces_of(tokenizer, "12345  w'LL!\n") == expected


BACKENDS = {
    pre: Tokenizer.from_gguf(byte_level_metadata(pre)).backend for pre in ("smollm", "gpt-2", "llama-bpe", "qwen2")
}


def words_of(pre: str, text: str) -> list[str]:
    pre_tokenizer = BACKENDS[pre].pre_tokenizer
    assert pre_tokenizer is not None
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]


@given(st.text())
def test_smollm_cuts_as_digits_before_byte_level(text: str) -> None:
    digits_first = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert words_of("smollm", text) == [word for word, _ in digits_first.pre_tokenize_str(text)]
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert words_of("gpt-2", text) == [word for word, _ in plain.pre_tokenize_str(text)]


def test_words_of_the_larger_patterns() -> None:
    text = "I'LL pay 12345!!\r\n  ok"
    assert words_of("llama-bpe", text) == ["I", "'LL", "Ġpay", "Ġ", "123", "45", "!!čĊ", "Ġ", "Ġok"]
    assert words_of("qwen2", text) == ["I", "'LL", "Ġpay", "Ġ", *"12345", "!!čĊ", "Ġ", "Ġok"]


def test_qwen2_composes_characters() -> None:
    decomposed = "e\u0301"
    assert Tokenizer.from_gguf(byte_level_metadata("qwen2")).encode(decomposed) == BYTE_LEVEL.encode("é")
    assert BYTE_LEVEL.encode(decomposed) != BYTE_LEVEL.encode("é")


@pytest.mark.parametrize(
    ("metadata", "text", "expected"),
    [
        (byte_level_metadata("gpt-2"), "he", ["he"]),
        (byte_level_metadata("gpt-2", add_bos_token=True), "he", ["<s>", "he"]),
        (byte_level_metadata("gpt-2", add_bos_token=True, add_eos_token=True), "he", ["<s>", "he", "</s>"]),
        (byte_level_metadata("llama-bpe"), "he", ["<s>", "he"]),
        (byte_level_metadata("llama-bpe", add_bos_token=False), "he", ["he"]),
        (sentencepiece_metadata(), "hello", ["<s>", f"{SPACE}hello"]),
        (sentencepiece_metadata(add_bos_token=False), "hello", [f"{SPACE}hello"]),
        (sentencepiece_metadata(add_space_prefix=False), "hel", ["<s>", "h", "el"]),
    ],
)
def test_special_tokens_are_added_as_the_file_says(metadata: dict[str, Any], text: str, expected: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(metadata)
    assert [tokenizer.id_to_token(token) for token in tokenizer.encode(text)] == expected


def test_sentencepiece_merges_the_best_piece_and_falls_back_to_bytes() -> None:
    assert pieces_of(SENTENCEPIECE, "hello helo") == [f"{SPACE}hello", f"{SPACE}hel", "o"]
    assert pieces_of(SENTENCEPIECE, "é日") == [SPACE, "é", "<0xE6>", "<0x97>", "<0xA5>"]
    for text in TEXTS:
        assert SENTENCEPIECE.decode(SENTENCEPIECE.encode(text)) == text


def test_sentencepiece_takes_merges_where_the_file_has_them() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(merges=["l o"]))
    assert pieces_of(tokenizer, "hello") == [SPACE, "h", "e", "l", "lo"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (byte_level_metadata("tekken"), r"tokenizer\.ggml\.pre 'tekken' is not supported; supported: default, gpt-2"),
        (byte_level_metadata(model="t5"), r"tokenizer\.ggml\.model 't5' is not supported; supported: 'gpt2', 'llama'"),
        ({"tokenizer.ggml.model": "gpt2"}, r"has no tokenizer\.ggml\.tokens"),
        (byte_level_metadata(token_type=[1]), "holds 1 types for"),
        (byte_level_metadata(tokens=["a", "a"], token_type=[1, 1]), "names 1 tokens twice"),
        (byte_level_metadata(add_bos_token=True, bos_token_id=None), "adds a bos token, but .* is None"),
    ],
)
def test_what_cannot_be_built_is_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_gguf(metadata)


def test_from_folder(tmp_path: Path) -> None:
    BYTE_LEVEL.backend.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "</s>"}, "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.encode("hello") == BYTE_LEVEL.encode("hello")
    assert tokenizer.vocab_size == BYTE_LEVEL.vocab_size == 265
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match="must hold a JSON object"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json; make one with transformers"):
        Tokenizer.from_folder(tmp_path)


def test_no_partial_character_is_shown() -> None:
    ids = BYTE_LEVEL.encode("a👍日")
    assert streamed(BYTE_LEVEL, ids) == ["a", "", "", "", "👍", "", "", "日", ""]
    assert streamed(BYTE_LEVEL, ids[:4]) == ["a", "", "", "", "\ufffd"]
    assert "".join(streamed(BYTE_LEVEL, [ids[1], *ids[:1]])) == "\ufffda"


def test_sentencepiece_runs_of_bytes_wait_for_their_end() -> None:
    ids = SENTENCEPIECE.encode("hello日 hello", add_special_tokens=False)
    assert streamed(SENTENCEPIECE, ids) == ["hello", "", "", "", "日 hello", ""]
    assert streamed(SENTENCEPIECE, ids[:3]) == ["hello", "", "", "\ufffd\ufffd"]


def test_a_prompt_keeps_the_space_after_it() -> None:
    ids = SENTENCEPIECE.encode("hello hello", add_special_tokens=False)
    assert streamed(SENTENCEPIECE, ids[1:]) == ["hello", ""]
    assert streamed(SENTENCEPIECE, ids[1:], prompt=ids[:1]) == [" hello", ""]


def test_a_prompt_may_end_inside_a_character() -> None:
    ids = BYTE_LEVEL.encode("a👍b")
    assert streamed(BYTE_LEVEL, ids[3:], prompt=ids[:3]) == ["", "👍", "b", ""]


def test_endless_bytes_do_not_wait_for_ever() -> None:
    byte = SENTENCEPIECE.token_to_id("<0xFF>")
    assert byte is not None
    shown = streamed(SENTENCEPIECE, [byte] * 200)
    assert "".join(shown) == "\ufffd" * 200
    assert sum(map(bool, shown)) >= 3


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3)), st.booleans())
def test_byte_level_stream_equals_decode(ids: list[int], skip: bool) -> None:
    text = "".join(streamed(BYTE_LEVEL, ids, skip_special_tokens=skip))
    assert text == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.integers(0, SENTENCEPIECE.vocab_size - 1), max_size=50), st.booleans())
def test_sentencepiece_stream_equals_decode(ids: list[int], skip: bool) -> None:
    text = "".join(streamed(SENTENCEPIECE, ids, skip_special_tokens=skip))
    assert text == SENTENCEPIECE.decode(ids, skip_special_tokens=skip)


def test_other_decoders_stream_too() -> None:
    backend = Backend(models.WordPiece(vocab={"[UNK]": 0, "play": 1, "##ing": 2, "game": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = Tokenizer(backend)
    assert not tokenizer.is_byte_level
    assert streamed(tokenizer, [1, 2, 3]) == ["play", "ing", " game", ""]


@pytest.fixture(scope="module")
def smollm2_tokenizer() -> Tokenizer:
    """The packaged model's tokenizer, without its weights."""
    return Tokenizer.from_gguf(GGUFFile(packaged_file()).metadata)


HARD = st.text(st.sampled_from("aé 日本語👍👩‍👧🏳️\n\t1é\u0301\U0001f9d1"), max_size=40)


@pytest.mark.model
@given(texts=st.lists(HARD, max_size=4), cut=st.integers(0, 20), noise=st.lists(st.integers(0, 49151), max_size=12))
def test_smollm2_stream_equals_decode(
    smollm2_tokenizer: Tokenizer, texts: list[str], cut: int, noise: list[int]
) -> None:
    tokenizer = smollm2_tokenizer
    whole = [token for text in texts for token in tokenizer.encode(text)]
    assert tokenizer.decode(whole) == "".join(texts)
    for ids in (whole, whole[cut:], [*whole[:cut], *noise, *whole[cut:]]):
        shown = streamed(tokenizer, ids)
        assert "".join(shown) == tokenizer.decode(ids)
    for part in streamed(tokenizer, whole):
        assert "\ufffd" not in part
