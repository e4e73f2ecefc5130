"""Tags are found whatever tokens they are cut into."""

import itertools
import re
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from care_jax.method import spans

EOS = 256
# One token per byte, EOS, then tokens that straddle what they can.
PIECES = [b"><", b".</", b">A", b"</", b"think", b"answer", b"</think>", b"k></th", b"", b">\n"]
TOKEN_BYTES = [bytes([byte]) for byte in range(256)] + [b"<|im_end|>", *PIECES]
GOOD = "<think>two dots.</think><answer>12</answer>"


def tokens_of(*pieces):
    """Token ids of pieces: a str goes byte by byte, bytes are one token."""
    ids = []
    for piece in pieces:
        ids += list(piece.encode()) if isinstance(piece, str) else [TOKEN_BYTES.index(piece, 256)]
    return ids


def parse(*pieces, eos=True, **kwargs):
    tokens = tokens_of(*pieces) + [EOS] * eos
    return spans.parse(tokens, TOKEN_BYTES, eos_token_ids=(EOS,), **kwargs)


def indices(mask):
    return np.flatnonzero(mask).tolist()


def test_clean_tokens_are_counted_strictly_between_the_tags():
    found = parse(GOOD)
    assert (found.num_think, found.num_answer) == (len("two dots."), len("12"))
    assert found.answer == "12"
    assert (found.fmt, found.has_answer) == (1.0, True)


def test_spans_include_their_tags_and_eos_is_the_answers():
    found = parse(" ", GOOD, " ")
    start_answer = 1 + GOOD.index("<answer>")
    assert indices(found.is_think) == list(range(1, start_answer))
    # The blank before EOS is in no span; EOS after it is.
    assert indices(found.is_answer) == [*range(start_answer, 1 + len(GOOD)), len(GOOD) + 2]
    assert found.is_think.shape == found.is_answer.shape == (len(GOOD) + 3,)


def test_straddling_token_is_in_both_spans_and_in_neither_count():
    # <think> | a | .</ | think | >< | answer | >A | </ | answer | > | EOS
    found = parse("<think>a", b".</", b"think", b"><", b"answer", b">A", b"</", b"answer", ">")
    straddling = 7 + 1 + 2
    assert found.is_think[straddling] and found.is_answer[straddling]
    assert not found.is_think[straddling + 1] and not found.is_answer[straddling - 1]
    assert (found.num_think, found.num_answer) == (1, 0)
    assert (found.answer, found.fmt) == ("A", 1.0)


@given(st.data())
def test_spans_follow_the_bytes_however_they_are_cut(data):
    text = "\n<think>é = 2.</think>\n<answer> B </answer>".encode()
    cuts = data.draw(st.sets(st.integers(1, len(text) - 1)).map(sorted))
    pieces = list(itertools.pairwise([0, *cuts, len(text)]))
    found = spans.parse(
        [*range(len(pieces)), 99], [text[a:b] for a, b in pieces], eos_token_ids=(99,)
    )
    think, rationale, answer = (text.index(x) for x in (b"<think>", "é".encode(), b"<answer>"))
    close_think, end_think = rationale + len("é = 2.".encode()), answer - 1

    assert indices(found.is_think) == [
        i for i, (a, b) in enumerate(pieces) if {*range(a, b)} & {*range(think, end_think)}
    ]
    assert indices(found.is_answer) == [
        *(i for i, (a, b) in enumerate(pieces) if {*range(a, b)} & {*range(answer, len(text))}),
        len(pieces),
    ]
    assert found.num_think == sum(
        {*range(a, b)} <= {*range(rationale, close_think)} for a, b in pieces
    )
    assert (found.answer, found.fmt) == ("B", 1.0)


@pytest.mark.parametrize(
    ("text", "fmt", "answer"),
    [
        ("<think>r</think>\n <answer>3</answer>\n", 1.0, "3"),
        ("<think></think><answer>3</answer>", 1.0, "3"),
        ("so <think>r</think><answer>3</answer>", 0.0, "3"),
        ("<think>r</think>so<answer>3</answer>", 0.0, "3"),
        ("<think>r</think><answer>3</answer>!", 0.0, "3"),
        ("<answer>3</answer>", 0.0, "3"),
        ("r</think><answer>3</answer>", 0.0, "3"),
        ("<answer>3</answer><think>r</think>", 0.0, "3"),
        ("<think>r</think><think>r</think><answer>3</answer>", 0.0, "3"),
        ("<think>r</think><answer> \n</answer>", 0.0, ""),
        ("<think>r</think><answer>3</answer><answer>4</answer>", 0.0, ""),
        ("<think>r</think><answer><answer>3</answer></answer>", 0.0, ""),
        ("<think>r</think><answer>3", 0.0, ""),
        ("<think>r</think></answer>3<answer>", 0.0, ""),
        ("<think>r<answer>3</answer></think>", 0.0, ""),
        ("<think>r<answer>3</answer>", 0.0, ""),
        ("<think>r</think><answer>3</think></answer>", 0.0, ""),
        ("<answer><think>r</think>3</answer>", 0.0, ""),
        ("<think>the <answer> tag</think><answer>3</answer>", 0.0, ""),
        ("<THINK>r</THINK><answer>3</answer>", 0.0, "3"),
        ("3", 0.0, ""),
        ("", 0.0, ""),
    ],
)
def test_only_one_closed_rationale_then_one_answer_is_well_formed(text, fmt, answer):
    found = parse(text)
    assert (found.fmt, found.answer, found.has_answer) == (fmt, answer, answer != "")
    assert found.is_answer.any() == found.has_answer


def test_any_of_several_ends_completes_a_response():
    for end in (EOS, 300):
        found = spans.parse([*GOOD.encode(), end], TOKEN_BYTES, eos_token_ids=(EOS, 300))
        assert (found.fmt, found.answer, indices(found.is_answer)[-1]) == (1.0, "12", len(GOOD))


def test_response_without_eos_is_not_well_formed():
    found = parse(GOOD, eos=False)
    assert (found.fmt, found.answer) == (0.0, "12")
    assert found.is_answer.shape == (len(GOOD),)


def test_empty_response_has_no_spans():
    found = spans.parse([], TOKEN_BYTES, eos_token_ids=(EOS,))
    assert (found.fmt, found.has_answer, found.is_think.shape) == (0.0, False, (0,))


def test_an_unclosed_rationale_has_no_span():
    found = parse("<think>cut o", eos=False)
    assert (found.num_think, found.is_think.any()) == (0, False)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<t>two dots.</t><answer>2</answer>", "two dots."),
        ("<t>\n two dots.\n</t><answer>2</answer>", "\n two dots.\n"),
        ("<t>two dots. <answer>2</answer>", "two dots. "),  # never closed
        ("<t>two dots.</answer>", "two dots."),
        ("<t>two<t>dots</t>", "two"),
        ("Well: <t>two dots", "two dots"),  # cut off by its budget
        ("two dots. <answer>2</answer>", "two dots. "),  # never opened
        ("<answer>2</answer> as <t>I count", "I count"),
        ("<answer>2</answer>", ""),
        ("a < b and <answers> b", "a < b and <answers> b"),
    ],
)
def test_rationale_ends_at_the_next_tag_whichever_it_is(response, expected):
    assert spans.rationale_of(response, "t") == expected


def test_tokens_without_text_belong_to_where_they_stand():
    found = parse("<think>a", b"", "</think>", b"", "<answer>3</answer>")
    assert found.num_think == 2
    assert found.is_think[8] and not found.is_think[17] and not found.is_answer[17]
    beyond = spans.parse([*GOOD.encode(), 10_000, EOS], TOKEN_BYTES, eos_token_ids=(EOS,))
    assert beyond.fmt == 1.0


def test_think_tag_is_a_setting():
    text = "<reasoning>r</reasoning><answer>3</answer>"
    assert parse(text, think_tag="reasoning").fmt == 1.0
    assert parse(text).fmt == 0.0
    assert parse(GOOD, think_tag="reasoning").fmt == 0.0


@pytest.mark.parametrize("unit", ["<think>", "<", "</answer", "<answer></answer>", " "])
def test_parsing_takes_linear_time(unit):
    tokens = list(unit.encode()) * (200_000 // len(unit))
    start = time.perf_counter()
    spans.parse(tokens, TOKEN_BYTES, eos_token_ids=(EOS,))
    assert time.perf_counter() - start < 3  # seconds; measured 0.1


def test_automaton_ends_where_the_closing_tag_has_been_seen():
    table = spans.closing_tag_table(TOKEN_BYTES)
    assert table.shape == (9, len(TOKEN_BYTES)) and table.dtype == np.uint8

    def run(tokens):
        state = 0
        for token in tokens:
            state = table[state, token]
        return state

    assert run(tokens_of("</think>")) == run(tokens_of("a", b"</think>")) == 8
    assert run(tokens_of("</", b"think")) == 7
    assert run(tokens_of("<</thi")) == 5  # falls back to the second "<", not to the start
    assert run(tokens_of("</</thin", b"k></th", "abc")) == 8  # closed stays closed
    assert run(tokens_of("<think>")) == 0
    assert run(tokens_of("</thi", b"", b"")) == 5


@given(st.lists(st.sampled_from(range(len(TOKEN_BYTES))), max_size=12))
def test_automaton_agrees_with_a_search_in_the_text(tail):
    tokens = tokens_of("</thin")[: len(tail)] + tail
    table, state = spans.closing_tag_table(TOKEN_BYTES), 0
    text = b""
    for token in tokens:
        state, text = table[state, token], text + TOKEN_BYTES[token]
        assert (state == 8) == (re.search(rb"</think>", text) is not None)


def test_automaton_of_a_full_vocabulary_is_quick():
    rng = np.random.default_rng(0)
    text = rng.choice(np.frombuffer(b"</think> abc", np.uint8), 152_064 * 6).tobytes()
    vocabulary = [text[i : i + 6] for i in range(0, len(text), 6)]
    start = time.perf_counter()
    table = spans.closing_tag_table(vocabulary)
    assert table.shape == (9, 152_064)
    assert time.perf_counter() - start < 5  # seconds; measured 0.4


def byte_level_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    vocab["Ġt"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges=[("Ġ", "t")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<é>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def test_token_bytes_are_what_the_tokenizer_encodes():
    tokenizer = byte_level_tokenizer()
    table = spans.token_bytes(tokenizer, vocab_size=300)
    assert len(table) == 300 and table[-1] == b""
    assert len(spans.token_bytes(tokenizer)) == len(tokenizer) == 259
    assert sorted(table[:256]) == [bytes([byte]) for byte in range(256)]
    text = "a tab\té 数\x00\n<é>√<|im_end|>"
    ids = tokenizer.encode(text)
    assert b"".join(table[i] for i in ids) == text.encode()
    assert table[tokenizer.eos_token_id] == b"<|im_end|>"


def test_token_bytes_refuses_other_vocabularies():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"▁the": 0, "[UNK]": 1}, unk_token="[UNK]"))
    )
    with pytest.raises(ValueError, match="byte-level BPE"):
        spans.token_bytes(tokenizer)
    with pytest.raises(ValueError, match="vocab_size 100 must cover"):
        spans.token_bytes(byte_level_tokenizer(), vocab_size=100)


# Rationale, what is between the spans, answer. Real pieces: ".</", "><", ")</", ">\\n", "></".
REAL = [
    ("two dots.", "", "12"),
    ("\nThere are 3 bars.\n", "\n\n", " \\(\\frac{1}{2}\\) "),
    ("so $x = 5$", " ", "$5$"),
    ("∠A = 30°, é 数学 🙂", "\n", "30°"),
    ("if a</b then <c> and a > b</", "", "<b>"),
    ("def f(x):\n    return x  # </thin", "\n", "f(x)"),
    ("", "", "A"),
    ("12,345.67%", "", "12,345.67%"),
]


@pytest.fixture(scope="module")
def real_bytes(real_tokenizer):
    return spans.token_bytes(real_tokenizer, 151936)


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_token_bytes_of_the_real_vocabulary_are_what_it_encodes(real_tokenizer, real_bytes):
    assert len(real_tokenizer) in (151665, 151669) and len(real_bytes) == 151936
    assert all(real_bytes[: len(real_tokenizer)]) and not any(real_bytes[len(real_tokenizer) :])
    for rationale, _, answer in REAL:
        text = f"<|im_start|>{rationale}<tool_call>{answer}<|im_end|>"
        assert b"".join(real_bytes[i] for i in encode(real_tokenizer, text)) == text.encode()


@pytest.mark.parametrize("tag", ["think", "reasoning"])
@pytest.mark.parametrize("end", [151645, 151643])
def test_spans_over_real_pieces_follow_the_bytes(real_tokenizer, real_bytes, tag, end):
    num_straddling = 0
    for rationale, between, answer in REAL:
        think = f"<{tag}>{rationale}</{tag}>".encode()
        text = think + f"{between}<answer>{answer}</answer>".encode()
        tokens = encode(real_tokenizer, text.decode())
        pieces = [real_bytes[i] for i in tokens]
        assert b"".join(pieces) == text
        found = spans.parse(
            [*tokens, end], real_bytes, eos_token_ids=(151645, 151643), think_tag=tag
        )
        assert (found.fmt, found.answer) == (1.0, answer.strip())
        assert spans.rationale_of(text.decode(), tag) == rationale

        ends = np.cumsum([len(piece) for piece in pieces]).tolist()
        places = [{*range(b - len(piece), b)} for piece, b in zip(pieces, ends, strict=True)]
        opening = len(think) + len(between.encode())
        of_think, of_answer = {*range(len(think))}, {*range(opening, len(text))}
        inner = {*range(len(tag) + 2, len(think) - len(tag) - 3)}
        inner_answer = {*range(opening + len("<answer>"), len(text) - len("</answer>"))}
        assert found.is_think.tolist() == [bool(place & of_think) for place in places] + [False]
        assert found.is_answer.tolist() == [bool(place & of_answer) for place in places] + [True]
        assert found.num_think == sum(place <= inner for place in places)
        assert found.num_answer == sum(place <= inner_answer for place in places)
        num_straddling += sum(bool(place & of_think and place - of_think) for place in places)
    # Qwen3-VL's tokenizer has <think> and </think> as tokens of their own.
    is_one_token = len(encode(real_tokenizer, f"</{tag}>")) == 1
    assert (num_straddling > 0) == (not is_one_token)


@pytest.mark.parametrize("tag", ["think", "reasoning"])
def test_the_automaton_over_the_real_vocabulary_agrees_with_a_search(
    real_tokenizer, real_bytes, tag
):
    start = time.perf_counter()
    table = spans.closing_tag_table(real_bytes, tag)
    assert time.perf_counter() - start < 5  # seconds; measured 0.1
    last = len(tag) + 3
    assert table.shape == (last + 1, 151936)
    np.testing.assert_array_equal(table[-1], last)
    # Ids that the backbone has beyond the tokenizer's stand for no text.
    beyond = table[:, len(real_tokenizer) :]
    np.testing.assert_array_equal(beyond, np.arange(last + 1)[:, None].repeat(beyond.shape[1], 1))
    for rationale, between, answer in REAL:
        for before in ("", f"</{tag[:-1]}", f"<{tag}>", "<", "</"):
            text = f"{before}{rationale}</{tag}>{between}<answer>{answer}</answer>"
            state, seen = 0, b""
            for token in encode(real_tokenizer, text):
                state, seen = table[state, token], seen + real_bytes[token]
                assert (state == last) == (f"</{tag}>".encode() in seen)
            assert state == last


def test_a_release_of_a_larger_table_than_its_tokenizer_is_covered(real_tokenizer):
    """The 7B's embeddings have 152064 rows."""
    table = spans.token_bytes(real_tokenizer, 152064)
    assert len(table) == 152064 and spans.closing_tag_table(table).shape == (9, 152064)
