"""Trains a small byte-level BPE tokenizer in Qwen's style, offline in about a second.

Runs without a released backbone need a tokenizer of a few hundred tokens. This one has Qwen's
pre-tokenisation rule (digits are never merged), special tokens and chat template. It learns its
merges from the given texts and a fixed page of English. Unlike Qwen's it has no Unicode normaliser,
so that decoding always returns the encoded string.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# In Qwen's order. They get the last ids: in a vocabulary of V tokens <|endoftext|> is V - 8 and
# <|video_pad|> is V - 1.
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
VOCAB_SIZE = 640  # with the special tokens; the texts below alone would yield over 1024

CHAT_TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}"
    "<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_PRETOKENIZE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Tags are separate training texts, without ">": a merge such as ">Count" or "><" would cross a
# tag's end.
_TAGS = ("<think", "</", "think", "<answer", "answer", "<reasoning", "reasoning")
_ENGLISH = (
    *("You are a helpful assistant.", "system\n", "user\n", "assistant\n"),
    "First think about the reasoning process inside the tags, then give the final answer inside "
    "the answer tags.",
    "Your previous reasoning was incorrect. Identify the failing operation, correct it, and "
    "re-derive the necessary quantities. Keep this section concise. Do not restate the question.",
    " Wait, that is wrong. Wait, that is wrong. Let me check again. Look again. Now it is right.",
    "Think first, then answer. What is shown in the picture? Which of these is the largest value?",
    "The figure is a triangle with three sides and a right angle. Find the length of the side.",
    "Read the chart and compare the values, then take the difference between them. The total is "
    "the sum of all parts. The number of shapes is greater than the number of bars, so the answer "
    "must be less than ten. We have two equations; solve both for x and y. Choose one option from "
    "the list below: yes or no, true or false, left or right, above or below, first or last.",
    "I will count each one, step by step: one, two, three, four, five, six, seven, eight, nine.",
    "It cannot be that there were only some of them here, because they would also have been drawn "
    "by another hand. After some time he said that she could do more work when their people had "
    "no other way to make it; who but you may see such long days, and which year has its own?",
    "A circle of radius five touches every side of the square. What fraction of the region lies "
    "outside? Write your solution as a decimal rounded to two places, or as a percentage. "
    "According to the table, how many students preferred music over sports during the summer? "
    "Between which months did the price increase most? The graph shows population growth since "
    "nineteen ninety. Points on the line segment divide it into equal lengths; the angles formed "
    "by parallel lines measure sixty degrees. If the perimeter equals twice the width plus twice "
    "the height, calculate the area. Suppose a train travels at constant speed along the road. "
    "Does the pattern repeat? Explain why, using only information given in the diagram. "
    "Therefore the correct choice must be option B, because both conditions are satisfied.",
    "Several children bought apples, oranges and bananas at the market. Each box contains small "
    "white balls and large black cubes. The map displays rivers, roads and cities near the coast. "
    "Energy flows from plants toward animals; water changes into vapour when heated. A company "
    "reported higher sales last quarter, while costs remained about the same as before. "
    "However, the evidence suggests another reading: perhaps nobody noticed the missing label.",
)


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Trains the tokenizer on texts such as the model will write; deterministic in them.

    `AutoTokenizer.from_pretrained` opens its `save_pretrained` folder. Its EOS token is <|im_end|>
    and its padding token <|endoftext|>, as in the instruction-tuned releases.
    """
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(_PRETOKENIZE), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(texts), trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=131072,
    )


def _corpus(texts: Iterable[str]) -> Iterator[str]:
    yield from 50 * _TAGS
    yield from texts
    yield from (f"{space}{text}" for text in _ENGLISH for space in ("", " "))
