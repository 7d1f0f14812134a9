"""The book alone: what it compiles, what it lets through, how it keeps its place."""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from twostroke.engine.structured import (
    GrammarBook,
    GrammarRejected,
    GrammarSpec,
    InvalidGrammar,
    StructuredOutputMissing,
)
from twostroke.engine.structured.book import GrammarTooSlow
from twostroke.engine.structured.vocabulary import token_texts
from twostroke.engine.tokenizer import Tokenizer
from twostroke.stages.io import SchedulerOutput

pytest.importorskip("xgrammar")

EOS, OTHER_SPECIAL, VOCAB_SIZE = 256, 257, 260
Allowed = Callable[[GrammarBook, str], set[int]]


@pytest.fixture
def book(letters: Tokenizer) -> GrammarBook:
    return GrammarBook(letters, VOCAB_SIZE, (EOS,))


def accepts(book: GrammarBook, spec: GrammarSpec, text: str) -> bool:
    """Whether a text is allowed byte by byte, and may end."""
    book.register(["probe"], book.compile(spec))
    try:
        book.accept("probe", [*text.encode(), EOS])
    except GrammarRejected:
        return False
    finally:
        book.release("probe")
    return True


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (
            GrammarSpec(json_object=True),
            ["{}", '{"a": [1, {"b": null}], "é": "\\u00e9"}', "{\n }"],
            ["[]", '"a"', " {}"],
        ),
        (GrammarSpec(json_object=True), [], ['{"a": "\t"}', '{"a": "\x01"}', "{'a': 1}", '{"a": 01}', "{\t}"]),
        (GrammarSpec(regex=r"[0-9]{2}(\.x+)?"), ["12", "34.xx"], ["1", "12.", "123", "12 "]),
        (GrammarSpec(regex=r"\x41b"), ["Ab"], ["\u041b", "A"]),
        (GrammarSpec(choice=("yes", 'n"o\\', "née\n")), ["yes", 'n"o\\', "née\n"], ["y", "yesn", "nee\n"]),
        (GrammarSpec(grammar='root ::= "(" root ")" | ""'), ["", "()", "(())"], ["(", "())"]),
        (GrammarSpec(json_schema={"enum": ["a", 1, None]}), ['"a"', "1", "null"], ["2", "a"]),
        (GrammarSpec(json_schema={"type": "string", "maxLength": 2}), ['"é1"', '""'], ['"abc"', '"\t"', '"\n"']),
        (
            GrammarSpec(json_schema={"type": "string", "format": "ipv4"}),
            ['"0.10.255.1"', '"192.168.0.249"'],
            ['"1.2.3.04"', '"256.1.1.1"', '"1.2.3"', '"1.2.3.4.5"', '"1x2x3x4"'],
        ),
        (GrammarSpec(json_schema={"type": "array", "minItems": 1}), ["[1, true]"], ["[]"]),
        (GrammarSpec(json_schema={}), ["1", "{}", '"x"', "[null]"], ["x"]),
    ],
)
def test_what_a_grammar_lets_through(
    shared_book: GrammarBook, spec: GrammarSpec, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not accepts(shared_book, spec, text)] == []
    assert [text for text in bad if accepts(shared_book, spec, text)] == []


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        (GrammarSpec(regex="[0-9"), "regex", "Unclosed"),
        (GrammarSpec(regex="(?=a)b"), "regex", "Lookahead is not supported"),
        (GrammarSpec(regex="(" * 5000 + ")" * 5000), "regex", "exceeded the maximum"),
        (GrammarSpec(grammar="root ::= foo"), "grammar", 'Rule "foo" is not defined'),
        (GrammarSpec(grammar=""), "grammar", "root rule"),
        (GrammarSpec(json_schema={"type": "objekt"}), "json_schema", "Unsupported type"),
        (GrammarSpec(json_schema={"$ref": "#/nowhere"}), "json_schema", "nowhere"),
        (GrammarSpec(json_schema={"type": "string", "minLength": 5, "maxLength": 2}), "json_schema", "minLength 5"),
        (GrammarSpec(json_schema={"not": {}}), "json_schema/not", "not supported"),
    ],
)
def test_what_cannot_be_compiled_names_the_field(
    shared_book: GrammarBook, spec: GrammarSpec, field: str, words: str
) -> None:
    with pytest.raises(InvalidGrammar, match=words) as caught:
        shared_book.compile(spec)
    assert caught.value.field == field
    assert ".cc:" not in caught.value.reason


def test_a_specification_is_one(shared_book: GrammarBook) -> None:
    with pytest.raises(InvalidGrammar, match="must be a GrammarSpec"):
        shared_book.compile({"regex": "a"})  # pyright: ignore[reportArgumentType]


def test_a_model_that_cannot_end_a_text(letters: Tokenizer) -> None:
    with pytest.raises(InvalidGrammar, match="no end-of-sequence token"):
        GrammarBook(letters, VOCAB_SIZE, ()).compile(GrammarSpec(regex="a"))


def test_masks_move_with_the_tokens_and_with_nothing_else(book: GrammarBook, allowed: Allowed) -> None:
    compiled = book.compile(GrammarSpec(choice=("ab", "ac", "a")))
    book.register(["one", "two"], compiled)
    assert allowed(book, "one") == {ord("a")}
    assert allowed(book, "one") == {ord("a")}, "asking moved it"
    book.accept("one", [])
    book.accept("one", [ord("a")])
    book.accept("free", [7])
    assert allowed(book, "one") == {ord("b"), ord("c"), EOS}
    assert allowed(book, "two") == {ord("a")}
    book.accept("one", [ord("b")])
    assert allowed(book, "one") == {EOS}
    book.accept("one", [EOS])
    book.accept("one", [5])
    assert allowed(book, "one") == {EOS}, "after its end"
    book.register(["one"], compiled)
    assert allowed(book, "one") == {ord("a")}, "an id that is used again starts anew"


def test_masks_are_of_the_constrained_requests_of_the_step(book: GrammarBook) -> None:
    step = SchedulerOutput(num_scheduled_tokens={"free": 1, "b": 3, "a": 1})
    assert list(book.constrained(step)) == []
    assert book.grammar_output(step) is None
    book.register(["a", "b", "elsewhere"], book.compile(GrammarSpec(regex="x")))
    output = book.grammar_output(step)
    assert output is not None
    assert list(output.structured_output_request_ids) == list(book.constrained(step)) == ["b", "a"]
    assert output.grammar_bitmask.dtype == np.int32
    assert output.grammar_bitmask.shape == (2, 9)
    book.release("a")
    book.release("a")
    book.release("never")
    assert list(book.constrained(step)) == ["b"]


def test_special_and_unused_ids_are_never_allowed(book: GrammarBook, allowed: Allowed) -> None:
    book.register(["any"], book.compile(GrammarSpec(grammar=r"root ::= [^\x00]*")))
    tokens = allowed(book, "any")
    assert {ord("<"), EOS} <= tokens
    assert not tokens & {OTHER_SPECIAL, 258, 259}


def test_a_token_that_was_not_allowed(book: GrammarBook) -> None:
    book.register(["r"], book.compile(GrammarSpec(regex="abc")))
    with pytest.raises(GrammarRejected, match=f"'r': token {ord('c')} is not what its grammar allows"):
        book.accept("r", [ord("a"), ord("c")])


def test_a_grammar_that_takes_too_long(letters: Tokenizer) -> None:
    book = GrammarBook(letters, VOCAB_SIZE, (EOS,), max_token_seconds=0.0)
    book.register(["r"], book.compile(GrammarSpec(regex="(.?){300}")))
    book.grammar_output(SchedulerOutput(num_scheduled_tokens={"r": 1}))
    with pytest.raises(GrammarTooSlow, match="'r': one token took"):
        book.accept("r", [ord("a")])


def test_equal_specifications_are_compiled_once_on_many_threads(book: GrammarBook, allowed: Allowed) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(50)}}
    compiled: list[Any] = []
    start = threading.Barrier(8)

    def work(index: int) -> None:
        start.wait()
        for round_ in range(3):
            compiled.append(book.compile(GrammarSpec(json_schema=schema)))
            req_id = f"r{index}-{round_}"
            book.register([req_id], compiled[-1])
            book.accept(req_id, [ord("{")])
            assert ord("}") in allowed(book, req_id)
            book.release(req_id)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 24
    info = book._compiler._for_json  # pyright: ignore[reportPrivateUsage]
    assert info.get_cache_size_bytes() < 2 * compiled[0].matched.memory_size_bytes


def test_nothing_is_imported_before_it_is_needed(letters: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "xgrammar":
            raise ImportError("No module named 'xgrammar'")
        return real_import(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "xgrammar", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    book = GrammarBook(letters, VOCAB_SIZE, (EOS,))
    assert book.grammar_output(SchedulerOutput(num_scheduled_tokens={"r": 1})) is None
    with pytest.raises(StructuredOutputMissing, match=r"pip install 'twostroke\[serve\]'"):
        book.compile(GrammarSpec(regex="a"))


def test_the_bytes_of_sentencepiece_tokens() -> None:
    tokens = ["<unk>", "</s>", "<0x0A>", "<0xE2>", "▁", "▁the", "a"]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "</s>"])
    assert token_texts(Tokenizer(backend), 9) == [b"", b"", b"\n", b"\xe2", b" ", b" the", b"a", b"", b""]
    assert token_texts(Tokenizer(backend), 5) == [b"", b"", b"\n", b"\xe2", b" "]


def test_tokens_without_a_text_of_their_own_are_refused() -> None:
    backend = Backend(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(InvalidGrammar, match="no text of their own"):
        token_texts(Tokenizer(backend), 3)
