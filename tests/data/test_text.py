"""Text as tokens in windows: every token occurs once, and each label is the next token."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from purecompose import losses
from purecompose.data import CharacterVocabulary, arrays, load_text, text_windows
from purecompose.nn.layers import ClassesSecond
from purecompose.random import key


SHAKESPEARE = Path(__file__).parents[2].parent / "shared" / "data" / "tinyshakespeare.txt"
NAMES = ("input_ids", "labels")

# Halves of surrogate pairs cannot be encoded in UTF-8, and the byte order mark is not text.
texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\ufeff"), min_size=1, max_size=300)


@given(texts)
def test_decoding_gives_the_text_back(text: str) -> None:
    vocabulary = CharacterVocabulary.of(text)
    tokens = vocabulary.encode(text)
    assert tokens.dtype == torch.int64 and tokens.shape == (len(text),)
    assert vocabulary.decode(tokens) == text
    assert vocabulary.characters == "".join(sorted(set(text)))
    assert tokens.tolist() == [vocabulary.characters.index(one) for one in text]


@given(texts, texts)
def test_unknown_characters_are_refused_and_shown(known: str, text: str) -> None:
    vocabulary, missing = CharacterVocabulary.of(known), sorted(set(text) - set(known))
    if not missing:
        assert vocabulary.decode(vocabulary.encode(text)) == text
        return
    with pytest.raises(ValueError) as caught:
        vocabulary.encode(text)
    assert f"has {len(missing)} character" in str(caught.value) and repr(missing[0]) in str(caught.value)


def test_an_empty_text_has_no_tokens() -> None:
    assert CharacterVocabulary("ab").encode("").shape == (0,)
    assert CharacterVocabulary("ab").decode(torch.zeros(0, dtype=torch.int64)) == ""


@given(st.permutations("abcde"))
def test_the_order_of_the_characters_is_that_of_the_tokens(characters: list[str]) -> None:
    vocabulary = CharacterVocabulary("".join(characters))
    assert vocabulary.encode("edcba").tolist() == [characters.index(one) for one in "edcba"]


@given(num_tokens=st.integers(2, 200), length=st.integers(1, 60))
def test_windows_are_the_cut_text_and_labels_the_next_tokens(num_tokens: int, length: int) -> None:
    tokens = torch.arange(num_tokens)
    if num_tokens <= length:
        with pytest.raises(ValueError, match=f"too few for a window of {length}"):
            text_windows(tokens, length)
        return
    inputs, labels = text_windows(tokens, length)
    assert inputs.shape == labels.shape == ((num_tokens - 1) // length, length)
    assert inputs.flatten().tolist() == list(range(inputs.numel()))  # each once, in order
    assert torch.equal(labels, inputs + 1)
    assert num_tokens - 1 - labels.numel() < length  # no window is wasted


@given(text=texts, length=st.integers(1, 20), share=st.floats(0.05, 0.95))
def test_the_parts_are_the_files_start_and_end(
    tmp_path_factory: pytest.TempPathFactory, text: str, length: int, share: float
) -> None:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_bytes(text.encode())
    num_test = round(share * len(text))
    if min(num_test, len(text) - num_test) <= length:
        with pytest.raises(ValueError, match="too short for windows"):
            load_text(path, length, test_share=share)
        return
    data = load_text(path, length, test_share=share)
    start, end = text[: len(text) - num_test], text[len(text) - num_test :]
    dropped = 0
    for part, inputs, targets in (
        (start, data.train_inputs, data.train_targets),
        (end, data.test_inputs, data.test_targets),
    ):
        assert data.vocabulary.decode(inputs.flatten()) == part[: inputs.numel()]
        assert data.vocabulary.decode(targets.flatten()) == part[1 : targets.numel() + 1]
        dropped += len(part) - 1 - targets.numel()
    assert data.num_dropped == dropped
    assert (data.in_shape, data.num_classes) == ((length,), len(set(text)))


def test_line_ends_are_kept_and_the_byte_order_mark_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(b"\xef\xbb\xbf" + b"a\r\nb" * 10)
    assert load_text(path, 2).vocabulary.characters == "\n\rab"


def test_another_text_takes_a_given_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("ab" * 50)
    data = load_text(path, 4, vocabulary=CharacterVocabulary("xba"))
    assert data.num_classes == 3 and data.train_inputs[0].tolist() == [2, 1, 2, 1]
    with pytest.raises(ValueError, match=r"book\.txt: the text has 1 character that the vocabulary of 1 lacks: 'b'"):
        load_text(path, 4, vocabulary=CharacterVocabulary("a"))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere.txt"):
        load_text(tmp_path / "nowhere.txt")
    latin = tmp_path / "latin.txt"
    latin.write_bytes("grün".encode("latin-1") * 100)
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8: byte 2 is 0xfc"):
        load_text(latin)
    with pytest.raises(ValueError, match="test_share"):
        load_text(latin, test_share=1.0)


@given(seed=st.integers(0, 2**32), batch_size=st.integers(1, 7), start=st.integers(0, 2))
def test_batches_with_keys_equal_those_without(seed: int, batch_size: int, start: int) -> None:
    inputs, labels = text_windows(torch.arange(64), 3)
    pairs = arrays(inputs, labels, batch_size, drop_last=True)
    named = arrays(inputs, labels, batch_size, drop_last=True, names=NAMES)
    for one, other in (
        (list(pairs), list(named)),
        (list(pairs.epoch(key(seed), 3, start)), list(named.epoch(key(seed), 3, start))),
    ):
        assert len(one) == len(other) > 0
        for (x, y), batch in zip(one, other, strict=True):
            assert list(batch) == list(NAMES)
            assert torch.equal(batch["input_ids"], x) and torch.equal(batch["labels"], y)
    assert named.to("cpu").names == NAMES


def test_classes_come_second_and_nothing_else_changes() -> None:
    embedding = torch.nn.Embedding(9, 7)
    ids = torch.arange(8).reshape(2, 4)
    outputs = ClassesSecond(embedding)(ids)
    assert torch.equal(outputs, embedding(ids).transpose(1, 2)) and outputs.shape == (2, 7, 4)
    rows = F.cross_entropy(embedding(ids).reshape(8, 7), ids.flatten() % 7)
    assert losses.cross_entropy(outputs, ids % 7).item() == pytest.approx(rows.item(), rel=1e-6)


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="tiny Shakespeare is not on this machine")
def test_tiny_shakespeare() -> None:
    data = load_text(SHAKESPEARE)
    assert data.num_classes == 65 and data.in_shape == (128,)
    assert len(data.train_inputs) == (round(0.9 * 1_115_394) - 1) // 128
    assert data.vocabulary.decode(data.train_inputs[0]).startswith("First Citizen:\nBefore we proceed")
