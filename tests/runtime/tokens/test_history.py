"""A history's tokens, against plain tokenisation by tokenizers of every kind."""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from radixcache.runtime.tokens.history import TokenHistory
from radixcache.runtime.tokens.tokenizer import Tokenizer
from tests.runtime.tokens.tiny_tokenizers import (
    DELIMITERS,
    KINDS,
    LOSSLESS,
    awkward_added_tokens,
    byte_level,
    cut_by,
    prepending,
    tabletalk,
    train_on_bytes,
    word_piece,
    wrap,
)

SEED = 20_261_120
Kind = Callable[[], Backend]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)

WORDS = [
    *"The cats sat on the mat didn't they're ended cat end Ärger é 漢字 🙂".split(" "),
    *("👩‍👩‍👧", "\ufffd"),
    *"<think> <|mask|> <|strip|> <<|over er<|user|> </s> ▁ x . 1234567".split(" "),
    *"... < <| |> user ﬁ e\u0301".split(" "),
    *(" ", "  ", "   ", "\n", "\n\n", " \n ", "\t", "\u00a0"),
]


def some_text(rng: random.Random, most: int = 12) -> str:
    """Words with and without spaces, and now and then a delimiter."""
    parts = []
    for _ in range(rng.randint(0, most)):
        parts.append(rng.choice(DELIMITERS) if rng.random() < 0.15 else rng.choice(WORDS))
        parts.append(rng.choice(["", "", " "]))
    return "".join(parts)


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of its characters, one by one."""
    return [token for c in text for token in tokenizer.encode(c, special=False)]


def some_ids(rng: random.Random, tokenizer: Tokenizer, text: str) -> list[int]:
    """What a model may generate: its own spelling of a text, or anything, perhaps then an end."""
    size = tokenizer._tokenizer.backend_tokenizer.get_vocab_size()
    ids = tokenizer.encode(text, special=False)
    if rng.random() < 0.5:
        ids = spelled(tokenizer, text)
    if rng.random() < 0.3:
        ids = [rng.randrange(size) for _ in range(rng.randint(1, 20))]
    if rng.random() < 0.2:
        ids = ids[: rng.randint(0, len(ids))]
    if rng.random() < 0.3:
        ids = [*ids, rng.choice(list(tokenizer.delimiters))]
    return ids


def check(history: TokenHistory) -> None:
    """What is remembered is counted, sorted, within the budget, and cut where delimiters are."""
    texts = list(history._texts.values())
    assert sum(text.num_bytes for text in texts) == history.num_bytes <= history.max_bytes
    assert list(history._sorted) == sorted(history._texts)
    delimiters = history.tokenizer.delimiters
    for text in texts:
        for chars, token in text.cuts.tolist():
            assert text.text.startswith(delimiters[int(text.tokens[token])], chars)


# ------------------------------------------------------------------------------------- delimiters


@each_kind
def test_at_a_delimiter_tokenisation_starts_afresh(kind: Kind) -> None:
    tokenizer = wrap(kind())
    assert tokenizer.delimiters
    rng = random.Random(SEED)
    for _ in range(200):
        before, after = some_text(rng), some_text(rng)
        after = rng.choice(list(tokenizer.delimiters.values())) + after
        whole = tokenizer.encode(before + after, special=False)
        parts = [tokenizer.encode(part, special=False) for part in (before, after)]
        assert whole == parts[0] + parts[1], f"{before!r} {after!r}, seed {SEED}"


def test_tokens_that_depend_on_what_stands_before_them_are_no_delimiters() -> None:
    found = wrap(awkward_added_tokens()).delimiters.values()
    assert {"<|end|>", "<|strip|>", "<think>"} <= set(found)
    assert not {"<|mask|>", "<|user|>", "  ", "\n\n"} & set(found)

    overlapping = byte_level()
    contents = ["a<|system|>b", "<|gap|>", " <|end of gap|>"]
    overlapping.add_special_tokens([AddedToken(c, normalized=False) for c in contents])
    found = wrap(overlapping).delimiters.values()
    assert "<|gap|>" in found and not {"<|system|>", " <|end of gap|>"} & set(found)

    normalised = prepending()
    normalised.add_special_tokens([AddedToken("<|in_text|>", normalized=True)])
    assert "<|in_text|>" not in wrap(normalised).delimiters.values()

    words = byte_level()
    words.add_special_tokens([AddedToken("<|word|>", normalized=False, single_word=True)])
    assert not wrap(words).delimiters

    split = PreTrainedTokenizerFast(tokenizer_object=byte_level(), split_special_tokens=True)
    assert not Tokenizer(split).delimiters


# ------------------------------------------------------------------- nothing generated: equality


@each_kind
@pytest.mark.parametrize("max_bytes", [1 << 20, 20_000])
@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_without_generated_tokens_a_history_changes_nothing(kind: Kind, max_bytes: int, count: int):
    """Texts that go on, branch, repeat, are cut short and come under different salts."""
    tokenizer = wrap(kind())
    history = TokenHistory(tokenizer, max_bytes)
    rng = random.Random(SEED)
    texts = [""]
    for _ in range(count):
        text = rng.choice(texts[-12:])
        if rng.random() < 0.3:
            text = text[: rng.randint(0, len(text))]
        text = (text + some_text(rng))[-1500:]
        texts.append(text)
        tokens = history.encode(text, rng.choice([None, "", "a"])).tokens
        assert tokens.tolist() == tokenizer.encode(text, special=False), f"{text!r}, seed {SEED}"
        check(history)


def test_only_what_is_new_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = wrap(byte_level())
    history = TokenHistory(tokenizer)
    spy = Mock(side_effect=tokenizer.encode_with_offsets)
    monkeypatch.setattr(tokenizer, "encode_with_offsets", spy)
    start = "<|system|>Be kind.<|end|>"
    first = history.encode(start + "<|user|>Hello<|end|><|assistant|>")
    history.encode(start + "<|user|>Good day<|end|><|assistant|>")  # another conversation
    history.remember(first, tokenizer.encode("Hi there<|end|>", special=False))
    history.encode(first.text + "Hi there<|end|><|user|>Bye<|end|><|assistant|>")
    history.encode(first.text + "Hi there<|end|><|user|>More<|end|><|assistant|>")  # edited
    history.encode(first.text + "Rewritten<|end|>")
    assert [call.args[0] for call in spy.call_args_list] == [
        first.text,
        "<|user|>Good day<|end|><|assistant|>",
        "<|end|><|user|>Bye<|end|><|assistant|>",
        "<|user|>More<|end|><|assistant|>",
        "<|assistant|>Rewritten<|end|>",
    ]


# ------------------------------------------------------------------------- generated tokens: safety


@each_kind
@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_reused_tokens_read_as_plain_tokens_do(kind: Kind, count: int) -> None:
    """Conversations with random answers and templates that go on in any way."""
    tokenizer = wrap(kind())
    rng = random.Random(SEED)
    reused = 0
    for _ in range(count):
        history = TokenHistory(tokenizer, rng.choice([1 << 20, 3000]))
        text = some_text(rng)
        for _ in range(8):
            prompt = history.encode(text)
            plain = tokenizer.encode(text, special=False)
            got, wanted = (
                tokenizer.decode(list(ids), special=True) for ids in (prompt.tokens, plain)
            )
            if kind not in LOSSLESS:  # where the tokenizer adds or takes spaces, both are right
                got, wanted = ("".join(read.split()) for read in (got, wanted))
            assert got == wanted, f"{text!r}, seed {SEED}"
            reused += prompt.tokens.tolist() != plain
            check(history)
            if not plain:
                text += "x"
                continue
            ids = some_ids(rng, tokenizer, some_text(rng, 5))
            history.remember(prompt, ids)
            answer = tokenizer.decode(ids)
            if rng.random() < 0.2:
                answer = rng.choice([answer.strip(), answer[: rng.randint(0, len(answer))]])
            text += rng.choice(["", "", " "]) + answer
            text += rng.choice([rng.choice(DELIMITERS), " " + DELIMITERS[0], "\n", ""])
            text += some_text(rng)
    assert reused or kind is word_piece, f"seed {SEED}: no text had other tokens than plain ones"


@pytest.mark.parametrize("kind", LOSSLESS, ids=lambda kind: kind.__name__)
def test_an_answer_that_tokenises_differently_keeps_its_tokens(kind: Kind) -> None:
    tokenizer = wrap(kind())
    rng = random.Random(SEED)
    size = tokenizer._tokenizer.backend_tokenizer.get_vocab_size()
    ordinary = sorted(
        set(range(size)) - set(tokenizer._tokenizer.all_special_ids) - set(tokenizer.delimiters)
    )
    history = TokenHistory(tokenizer)
    drifted = 0
    text = "<|user|>Hello<|end|><|assistant|>"
    kept: list[int] = []
    for _ in range(30):
        prompt = history.encode(text)
        assert prompt.tokens[: len(kept)].tolist() == kept, f"seed {SEED}"
        generated = [rng.choice(ordinary) for _ in range(rng.randint(1, 30))]
        end = tokenizer.encode("<|end|>", special=False) if rng.random() < 0.5 else []
        history.remember(prompt, generated + end)
        kept = prompt.tokens.tolist() + generated
        answer = tokenizer.decode(prompt.tokens.tolist()[-3:] + generated, special=True)
        answer = answer[len(tokenizer.decode(prompt.tokens.tolist()[-3:], special=True)) :]
        drifted += tokenizer.encode(answer, special=False) != generated
        text += answer + "<|end|><|user|>" + some_text(rng, 3) + "<|end|><|assistant|>"
    assert drifted > 20


ASKED = "<|user|>What?<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("generated", "shown", "kept"),
    [
        ("The answer. STOP", "The answer. ", 12),  # a stop string
        ("The answer.\n\n", "The answer.", 11),  # trimmed by the template
        ("The answer. The question", "The answer.", 11),  # the same, of two tokens
        ("Here: 漢", "Here: \ufffd", 8),  # within a character
    ],
)
def test_an_answer_that_was_cut_keeps_the_tokens_before(generated: str, shown: str, kept: int):
    tokenizer = wrap(byte_level())
    history = TokenHistory(tokenizer)
    prompt = history.encode(ASKED)
    tokens = spelled(tokenizer, generated)[: 8 if "漢" in generated else None]
    history.remember(prompt, tokens)
    found = history.encode(ASKED + shown + "<|end|>").tokens.tolist()
    assert found[:-1] == prompt.tokens.tolist() + tokens[:kept]


def test_text_right_behind_an_answer_is_tokenised_as_one_with_it() -> None:
    """`. ` and `.\n` are tokens here: where the answer ends, none may be cut in two."""
    backend = cut_by(r" ?\p{L}+|[.?]\n|.")
    train_on_bytes(backend, ["The end.\nThe end.\n", "It is the end.\nUser: Why?"])
    tokenizer = wrap(backend)
    history = TokenHistory(tokenizer)
    prompt = history.encode("<|user|>What?\n[assistant]")
    answer = tokenizer.encode("It is the end.", special=False)
    history.remember(prompt, answer)
    text = prompt.text + "It is the end.\nUser: Why?"
    plain = tokenizer.encode(text, special=False)
    assert plain[: len(prompt.tokens) + len(answer)] != [*prompt.tokens, *answer]
    assert history.encode(text).tokens.tolist() == plain

    other = spelled(tokenizer, "It is the end")
    history = TokenHistory(tokenizer)
    history.remember(prompt, [*other, answer[-1]])
    tokens = history.encode(text).tokens.tolist()
    kept = [*prompt.tokens, *other]
    assert tokens == kept + tokenizer.encode(".\nUser: Why?", special=False)


def test_an_edited_question_behind_plain_text_still_finds_the_answer_before() -> None:
    tokenizer = wrap(byte_level())
    history = TokenHistory(tokenizer)
    prompt = history.encode("<|user|>What? Answer:")
    answer = spelled(tokenizer, " The cats")
    history.remember(prompt, answer)
    for question in ("Why?", "When?", "Whom?", "Who?"):
        tokens = history.encode(f"{prompt.text} The cats\n{question} Answer:").tokens
        assert tokens[: len(prompt.tokens) + len(answer)].tolist() == [*prompt.tokens, *answer]
        history.remember(history.encode(f"{prompt.text} The cats\n{question} Answer:"), [40, 41])


@pytest.mark.parametrize(
    ("text", "generated", "shown", "is_kept"),
    [
        (ASKED, "▁ T h e", "The", True),
        (ASKED, "▁ T h e", " The", False),
        (ASKED + "\n", "T h e", "The", True),
        # Four bytes, three bytes: the answer begins within the last character of the prompt.
        ("Draw 👩ﬁ", "<0xEF> <0xAC> <0x81> T h e", "ﬁThe", True),
    ],
)
def test_a_space_or_a_byte_that_only_tokens_have_does_not_hide_an_answer(
    text: str, generated: str, shown: str, is_kept: bool
) -> None:
    """Llama 2's tokenizer begins each piece with a space; what is shown is without it."""
    tokenizer = wrap(prepending())
    history = TokenHistory(tokenizer)
    prompt = history.encode(text)
    tokens = tokenizer._tokenizer.convert_tokens_to_ids(generated.split(" "))
    history.remember(prompt, tokens)
    found = history.encode(f"{text}{shown}<|end|>").tokens[:-1].tolist()
    assert (found == [*prompt.tokens.tolist(), *tokens]) == is_kept


def test_special_tokens_within_an_answer_are_not_taken_for_its_text() -> None:
    tokenizer = wrap(byte_level())
    history = TokenHistory(tokenizer)
    prompt = history.encode(ASKED)
    generated = tokenizer.encode("A<|user|>B", special=False)
    history.remember(prompt, generated)
    text = prompt.text + tokenizer.decode(generated) + "<|end|>"
    assert text.endswith("AB<|end|>")
    assert history.encode(text).tokens.tolist() == tokenizer.encode(text, special=False)


def test_other_salts_get_none_of_an_answer() -> None:
    tokenizer = wrap(byte_level())
    history = TokenHistory(tokenizer)
    for salt in ("a", None):
        prompt = history.encode(ASKED, salt)
        history.remember(prompt, spelled(tokenizer, "The cats"))
    text = prompt.text + "The cats<|end|>"
    plain = tokenizer.encode(text, special=False)
    for salt, same in (("a", False), ("b", True), ("", True), (None, False), ("a", False)):
        assert (history.encode(text, salt).tokens.tolist() == plain) == same


def test_what_was_used_least_recently_is_forgotten_first() -> None:
    history = TokenHistory(wrap(byte_level()), max_bytes=4000)
    texts = [f"<|user|>{i} {'cats ' * 20}" for i in range(6)]
    first = history.encode(texts[0])
    for text in texts[1:]:
        history.encode(text)
        assert history.encode(texts[0]) is first
    kept = {text.text for text in history._texts.values()}
    assert texts[0] in kept and texts[-1] in kept and texts[1] not in kept
    assert len(history.encode("x" * 5000).tokens) and not history._texts  # too much for the budget


def test_short_texts_are_counted_with_all_that_they_take() -> None:
    history = TokenHistory(wrap(byte_level()))
    history.encode("<|user|>")
    tracemalloc.start()
    try:
        for i in range(300):
            history.encode(f"<|user|>{i}", "\U0001f600" * 500 + f"{i}")
        assert tracemalloc.get_traced_memory()[0] < history.num_bytes
    finally:
        tracemalloc.stop()


def test_a_tokenizer_without_delimiters_is_used_plainly() -> None:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<|word|>", normalized=False, single_word=True)])
    tokenizer = wrap(backend)
    history = TokenHistory(tokenizer)
    prompt = history.encode("<|user|>What?")
    history.remember(prompt, tokenizer.encode("x"))
    assert prompt.tokens.tolist() == tokenizer.encode("<|user|>What?") and not history._texts


def test_a_long_text_holds_up_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = wrap(tabletalk())
    history, encode = TokenHistory(tokenizer), tokenizer.encode_with_offsets
    begun, may_end = threading.Event(), threading.Event()

    def slow(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        if text.startswith("long"):
            begun.set()
            assert may_end.wait(10)
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode_with_offsets", slow)
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(history.encode, "long<|end|>")
        assert begun.wait(10)
        short = pool.submit(history.encode, "short<|end|>").result(10)
        history.remember(short, tokenizer.encode("Yes.", special=False))
        assert not late.done()
        may_end.set()
        assert late.result(10).tokens.tolist() == tokenizer.encode("long<|end|>", special=False)
    assert history.encode("short<|end|>Yes.").num_generated
