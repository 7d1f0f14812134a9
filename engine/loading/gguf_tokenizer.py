"""Builds a ``tokenizers`` tokenizer from the vocabulary and merges in a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen
from gguf import TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from ..tokenizer import TokenizerError

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@frozen
class _PreTokenizer:
    """How a byte-level vocabulary cuts text into words: each pattern splits what the one before left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    composes_unicode: bool = False


_LLAMA3 = _PreTokenizer((_CL100K.replace("{DIGITS}", "{1,3}"),), ignore_merges=True, adds_bos=True)
_QWEN2 = _PreTokenizer((_CL100K.replace("{DIGITS}", ""),), composes_unicode=True)
_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _PreTokenizer((_GPT2,)),
    "smollm": _PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
"""Patterns by ``tokenizer.ggml.pre``."""


def build_backend(metadata: Mapping[str, Any]) -> Backend:
    """The tokenizer that a GGUF file describes: byte-level BPE ("gpt2") or SentencePiece BPE ("llama").

    Raises:
        TokenizerError: another kind of tokenizer, an unknown pre-tokenizer, or missing metadata.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens: Sequence[str] = _needed(metadata, "tokenizer.ggml.tokens")
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise TokenizerError(f"tokenizer.ggml.token_type holds {len(types)} types for {len(tokens)} tokens")
    if kind == "gpt2":
        backend, adds_bos = _byte_level_bpe(metadata, tokens)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece_bpe(metadata, tokens, types), True
    else:
        raise TokenizerError(f"tokenizer.ggml.model {kind!r} is not supported; supported: 'gpt2', 'llama'")
    added = {TokenType.CONTROL: True, TokenType.USER_DEFINED: False}
    backend.add_tokens(
        [
            AddedToken(token, special=added[TokenType(kind)], normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in added
        ]
    )
    _add_template(backend, metadata, tokens, adds_bos=adds_bos)
    return backend


def _needed(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise TokenizerError(f"the GGUF file has no {key}: it was made without a tokenizer")
    return metadata[key]


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Backend, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise TokenizerError(f"tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(_PRE_TOKENIZERS)}")
    pre = _PRE_TOKENIZERS[name]
    merges = [_pair(merge) for merge in _needed(metadata, "tokenizer.ggml.merges")]
    backend = Backend(models.BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=pre.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=metadata.get("tokenizer.ggml.add_space_prefix", False), use_regex=False
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    if pre.composes_unicode:
        backend.normalizer = normalizers.NFC()
    return backend, pre.adds_bos


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Backend:
    vocabulary = _vocabulary(tokens)
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    if "tokenizer.ggml.merges" in metadata:
        merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    else:
        merges = _merges_by_score(vocabulary, types, _needed(metadata, "tokenizer.ggml.scores"))
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_by_score(
    vocabulary: Mapping[str, int], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """SentencePiece merges whatever pair makes the piece with the best score, so its merges are all ways to cut one."""
    pieces = sorted(
        (token for token, token_id in vocabulary.items() if types[token_id] == TokenType.NORMAL),
        key=lambda token: (-scores[vocabulary[token]], vocabulary[token]),
    )
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise TokenizerError(f"the vocabulary names {len(tokens) - len(vocabulary)} tokens twice")
    return vocabulary


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _add_template(backend: Backend, metadata: Mapping[str, Any], tokens: Sequence[str], *, adds_bos: bool) -> None:
    """Add beginning and end of sequence to what is encoded with special tokens, as the file's flags say."""
    first = _special(metadata, tokens, "bos", is_added=metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    last = _special(metadata, tokens, "eos", is_added=metadata.get("tokenizer.ggml.add_eos_token", False))
    if not first and not last:
        return

    def around(sequence: str) -> list[str]:
        return [*(token for token, _ in first), sequence, *(token for token, _ in last)]

    backend.post_processor = processors.TemplateProcessing(
        single=around("$A"), pair=[*around("$A"), *around("$B:1")], special_tokens=[*first, *last]
    )


def _special(metadata: Mapping[str, Any], tokens: Sequence[str], name: str, *, is_added: bool) -> list[tuple[str, int]]:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if not is_added:
        return []
    if not isinstance(token_id, int) or token_id >= len(tokens):
        raise TokenizerError(f"the GGUF file adds a {name} token, but tokenizer.ggml.{name}_token_id is {token_id}")
    return [(str(tokens[token_id]), token_id)]
