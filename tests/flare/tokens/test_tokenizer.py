"""Tokenizers from both kinds of files against slow ones written from the definition, and against the default model's
known ids."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from flare.graphs.weights.errors import ModelError
from flare.graphs.weights.gguf_file import open_gguf
from flare.model import Model
from flare.tokens.from_gguf import tokenizer_from_gguf
from flare.tokens.from_hf import tokenizer_from_directory
from tests.tiny_tokenizers import (
    SPLITS,
    byte_level_json,
    byte_level_metadata,
    byte_level_oracle,
    byte_level_tokens,
    sentencepiece_metadata,
    sentencepiece_oracle,
)

REFERENCE = Path(__file__).parents[2] / "data" / "smollm2_135m_q4_1_greedy.json"
SPECIAL = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "1, 2, 3, 4, 5,",
    "Hello world! It's 12345.67 o'clock, I'LL say; they'd've gone.",
    "  leading\n\n\n   and trailing   \t\r\n spaces  ",
    "def f(x):\n    return x**2  # tab\there\n\n",
    "日本語のテキスト、漢字かな交じり。 中文 测试一下。 한국어 문장입니다.",
    "Ünïcödé ñandú café naïve — “quotes” … ½ ² ³ Ⅷ ٣٤٥ १२३",
    "🙂🙂 👩‍👩‍👧‍👦 🇫🇷 ok\u200bzero\u00a0width\u3000wide",
    "Привет, как дела? שלום עולם مرحبا بالعالم สวัสดีครับ",
    "a" * 50 + " " * 37 + "!!!???...///" + "\x00\x01\x7f",
]


def texts() -> st.SearchStrategy[str]:
    lively = st.text(st.sampled_from("helo wrd123\n\r\t'sSré日🙂<|im_end|>."), max_size=40)
    return lively | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_the_default_vocabulary_under_every_pre_tokenizer(default_model_path: Path, pre: str) -> None:
    metadata = open_gguf(default_model_path).metadata | {"tokenizer.ggml.pre": pre}
    tokenizer = tokenizer_from_gguf(metadata)
    for text in CORPUS:
        ids = tokenizer.encode(text, parse_special=False)
        assert ids == byte_level_oracle(metadata, text)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_any_text_under_every_pre_tokenizer(pre: str) -> None:
    metadata = byte_level_metadata([], pre)
    tokenizer = tokenizer_from_gguf(
        metadata | {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.eos_token_id": None}
    )

    @given(texts())
    @settings(deadline=None)
    def check(text: str) -> None:
        if pre == "qwen2":  # its tokenizer composes characters first
            text = unicodedata.normalize("NFC", text)
        ids = tokenizer.encode(text, parse_special=False)
        assert ids == byte_level_oracle(metadata, text)
        assert tokenizer.decode(ids) == text

    check()


def test_known_ids_and_texts_of_the_default_model(default_model: Model) -> None:
    tokenizer = default_model.tokenizer
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (49152, 1, (2,))
    for name, case in json.loads(REFERENCE.read_text()).items():
        if not name.startswith("chat:"):
            assert tokenizer.encode(case["prompt"], parse_special=True) == case["ids"]
        assert tokenizer.decode(case["out"], skip_special=False) == case["text"]
    for length in (1, 8, 63, 64, 65):
        assert len(tokenizer.encode(" the" * length, parse_special=True)) == length
    day = tokenizer.encode("日本語", parse_special=False)
    assert [tokenizer.token_bytes(token).hex() for token in day] == ["e697", "a5", "e69cac", "e8", "aa", "9e"]


def test_special_tokens_are_parsed_only_when_asked(default_model: Model) -> None:
    tokenizer = default_model.tokenizer
    text = "hi<|im_end|>\n<|im_start|>system"
    assert tokenizer.encode(text, parse_special=True)[1] == 2
    literal = tokenizer.encode(text, parse_special=False)
    assert not any(tokenizer.is_special(token) for token in literal)
    assert tokenizer.decode(literal) == text
    assert tokenizer.decode([6004, 2], skip_special=True) == "hi"
    assert tokenizer.decode([6004, 2], skip_special=False) == "hi<|im_end|>"
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


def test_tokens_that_the_author_added_are_never_split() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata(SPECIAL, own=["<think>"]))
    think = len(byte_level_tokens()) + len(SPECIAL)
    for parse_special in (False, True):
        assert think in tokenizer.encode("hello <think> world", parse_special)
    assert not tokenizer.is_special(think)
    assert tokenizer.decode([think]) == "<think>"


def test_bad_utf8_becomes_one_replacement_for_each_maximal_sequence(default_model: Model) -> None:
    tokenizer = default_model.tokenizer
    first, second = tokenizer.encode("🙂", parse_special=False)[:1], 0
    assert tokenizer.token_bytes(first[0]) == b"\xf0\x9f"
    second = next(token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == b"\x8c")
    assert tokenizer.decode([*first, second] * 12) == "\ufffd" * 12


def test_lone_surrogates_do_not_raise(default_model: Model) -> None:
    tokenizer = default_model.tokenizer
    assert tokenizer.decode(tokenizer.encode("a\ud83d!", parse_special=False)) == "a\ufffd!"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude42", parse_special=True)) == "🙂"


def test_ids_beyond_the_vocabulary_have_no_bytes(default_model: Model) -> None:
    assert default_model.tokenizer.token_bytes(10**9) == b""
    assert default_model.tokenizer.token_bytes(-1) == b""


def test_ends_are_where_tokens_end_in_the_text(default_model: Model) -> None:
    text = "Hi, 日本🙂 end<|im_end|>"
    ids, ends = default_model.tokenizer.encode_with_ends(text, parse_special=True)
    assert ids == default_model.tokenizer.encode(text, parse_special=True)
    joined = [b"".join(map(default_model.tokenizer.token_bytes, ids[: count + 1])) for count in range(len(ids))]
    for piece, end in zip(joined, ends, strict=True):
        assert text[:end].encode().startswith(piece)
        assert not text[: end - 1].encode().startswith(piece)


@pytest.mark.parametrize(
    ("pre", "declared", "expected"),
    [("gpt-2", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", True, True)],
)
def test_bos_is_added_as_the_gguf_file_says(pre: str, declared: bool | None, expected: bool) -> None:
    metadata = byte_level_metadata(SPECIAL, pre)
    if declared is not None:
        metadata["tokenizer.ggml.add_bos_token"] = declared
    tokenizer = tokenizer_from_gguf(metadata)
    bos = len(byte_level_tokens())
    assert (tokenizer.encode("hello", False)[0] == bos) == expected
    assert tokenizer.encode("hello", False, add_bos=True)[0] == bos
    assert tokenizer.encode("hello", False, add_bos=False)[0] != bos


def test_all_declared_ends_of_an_answer_count() -> None:
    metadata = byte_level_metadata(["<s>", "<|eot_id|>", "<|eom|>", "</s>"])
    ordinary = len(byte_level_tokens())
    assert tokenizer_from_gguf(metadata).eos_ids == (ordinary + 3, ordinary + 1)
    metadata["tokenizer.ggml.eot_token_id"] = ordinary + 2
    assert tokenizer_from_gguf(metadata).eos_ids == (ordinary + 3, ordinary + 2, ordinary + 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, r"'tekken'.*gpt-2.*smollm.*llama-bpe.*qwen2"),
        ({"tokenizer.ggml.model": "bert"}, r"'bert'.*gpt2, llama"),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.merges": [1, 2]}, r"tokenizer\.ggml\.merges"),
        ({"tokenizer.ggml.merges": ["zz zz"]}, r"cannot be rebuilt"),
        ({"tokenizer.ggml.token_type": [1]}, r"token types"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, r"eos"),
    ],
)
def test_unusable_gguf_tokenizers_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(byte_level_metadata(SPECIAL) | changes)


@given(st.text(st.sampled_from("helo wrdab.é日"), min_size=1, max_size=30))
@settings(deadline=None)
def test_sentencepiece_is_rebuilt(text: str) -> None:
    metadata = sentencepiece_metadata()
    tokenizer = SENTENCEPIECE
    ids = tokenizer.encode(text, parse_special=False)
    assert ids == [1, *sentencepiece_oracle(metadata, text)]
    assert tokenizer.decode(ids) == text


SENTENCEPIECE = tokenizer_from_gguf(sentencepiece_metadata())


def write_directory(folder: Path, bos: str | None = None, **files: object) -> None:
    (folder / "tokenizer.json").write_text(byte_level_json(SPECIAL, bos))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("bos", [None, "<|begin|>"])
def test_tokenizer_json_gives_what_transformers_give(tmp_path: Path, bos: str | None) -> None:
    write_directory(tmp_path, bos, tokenizer_config={"bos_token": "<|begin|>", "eos_token": {"content": "<|im_end|>"}})
    tokenizer = tokenizer_from_directory(tmp_path)
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))  # type: ignore[no-untyped-call]
    rebuilt = tokenizer_from_gguf(byte_level_metadata(SPECIAL))
    for text in [*CORPUS, "hello<|im_end|> world"]:
        assert tokenizer.encode(text, parse_special=True) == reference.encode(text)
        assert tokenizer.encode(text, False, add_bos=False) == rebuilt.encode(text, False, add_bos=False)
    begin = len(byte_level_tokens())
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (begin, (begin + 2,))
    assert tokenizer.encode("", True, add_bos=True) == [begin]


def test_generation_config_says_what_ends_an_answer(tmp_path: Path) -> None:
    begin = len(byte_level_tokens())
    write_directory(
        tmp_path,
        tokenizer_config={"eos_token": "<|im_end|>"},
        generation_config={"eos_token_id": [begin + 1, begin]},
        config={"eos_token_id": 5},
    )
    assert tokenizer_from_directory(tmp_path).eos_ids == (begin + 1, begin, begin + 2)
    (tmp_path / "generation_config.json").unlink()
    assert tokenizer_from_directory(tmp_path).eos_ids == (5, begin + 2)


def test_unusable_tokenizer_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        tokenizer_from_directory(tmp_path)
    write_directory(tmp_path)
    path = tmp_path / "tokenizer.json"
    declared = cast("dict[str, object]", json.loads(path.read_text()))
    path.write_text(json.dumps(declared | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}))
    with pytest.raises(ModelError, match=r"WordPiece; supported are ByteLevel and ByteFallback"):
        tokenizer_from_directory(tmp_path)
    path.write_text(json.dumps(declared | {"model": {"type": "Nonsense"}}))
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        tokenizer_from_directory(tmp_path)
