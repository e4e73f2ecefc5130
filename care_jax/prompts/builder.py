"""Builds prompts from examples: chat template, tokens, image patches, padding.

Prompts are left-padded, so that the logits of the first response token are always at the last
position of a row. A batch is padded to the smallest of a few (tokens, patches) buckets, so that few
shapes are compiled. A prompt that fits no bucket is reported (`fits`), never truncated.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float, Int
from PIL import Image
from transformers import PreTrainedTokenizerBase

from care_jax.batch import Example, Prompts, Unusable
from care_jax.prompts import templates
from care_jax.prompts.images import image_size, open_image
from care_jax.prompts.patches import target_size, to_patches
from care_jax.prompts.tokenizer import CHAT_TEMPLATE
from models.config import BackboneConfig
from models.families import FAMILIES
from models.positions import feature_indices, pack_images, prompt_positions
from models.release import config_json

IMAGE_PLACEHOLDER = "<image>"
_IMAGE_TOKEN = "<|image_pad|>"
# Config keys of a randomly initialised backbone, and the tokens whose ids they get.
_IMAGE_TOKENS = {
    "image_token_id": _IMAGE_TOKEN,
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_TOKEN_NAMES = {**_IMAGE_TOKENS, "eos_token_id": "<|im_end|>", "pad_token_id": "<|endoftext|>"}


@dataclasses.dataclass(frozen=True)
class TokenizedPrompt:
    """One prompt on the host, before padding."""

    tokens: Int[np.ndarray, " L"]  # with one image token per merged image feature
    grids: Int[np.ndarray, "I 3"]  # (frames, rows, columns) of each image, in patches
    patches: Float[np.ndarray, "n C"]  # of all images, concatenated
    image_sizes: tuple[tuple[int, int], ...] = ()  # (width, height) of each image as it was read


def continued(prompt: TokenizedPrompt, context: Int[np.ndarray, " c"]) -> TokenizedPrompt:
    """The prompt followed by the beginning of a response, which is text only."""
    return dataclasses.replace(prompt, tokens=np.concatenate([prompt.tokens, context]))


def prompt_sizes(prompts: Sequence[TokenizedPrompt]) -> Int[np.ndarray, "B 2"]:
    """Number of tokens and patches of each prompt."""
    sizes = [(len(prompt.tokens), len(prompt.patches)) for prompt in prompts]
    return np.array(sizes, np.int32).reshape(-1, 2)


def backbone_config(
    fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> BackboneConfig:
    """The config of a backbone with random weights: fields of a config.json, and these ids."""
    ids = {key: tokenizer.convert_tokens_to_ids(name) for key, name in _TOKEN_NAMES.items()}
    if "text_config" not in fields:  # a family without a tower
        return config_json.from_hf({"vocab_size": len(tokenizer), **fields, **ids})
    text = {"vocab_size": len(tokenizer), **fields["text_config"]}
    return config_json.from_hf({**fields, **ids, "text_config": text})


class PromptBuilder:
    """Turns examples into prompts for one backbone and one tokenizer.

    Args:
        tokenizer: must have a chat template; with a vision tower, one that accepts content items.
        config: the backbone; gives patch sizes, channel statistics and token ids.
        min_pixels, max_pixels: images are resized into this range of height x width.
        buckets: (prompt tokens P, patches N) a batch may be padded to; N in whole merge blocks, 0
            for text alone, as always without a tower.
        system_prompt: text of the system turn; if empty, the template may insert its default.
        instruction: appended to every question on a new line; empty for none.
        think_tag: name of the rationale's tag; replaces `{tag}` in the two texts above.
        patch_dtype: of the image patches; the backbone's compute dtype loses no precision.

    Raises:
        ValueError: tokenizer and backbone disagree, the template is text-only, or a size is wrong.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: BackboneConfig,
        *,
        min_pixels: int,
        max_pixels: int,
        buckets: Sequence[tuple[int, int]],
        system_prompt: str = "You are a helpful assistant.",
        instruction: str = "",
        think_tag: str = "think",
        patch_dtype: DTypeLike = np.float32,
    ):
        _check_tokenizer(tokenizer, config)
        if not 0 < min_pixels <= max_pixels:
            raise ValueError(
                f"min_pixels must be positive and at most max_pixels, got {min_pixels} and "
                f"{max_pixels}; change data.min_pixels or data.max_pixels"
            )
        if config.vision is None and any(n for _, n in buckets):
            raise ValueError(
                f"a {config.family} backbone reads text alone, so buckets must have 0 patches, got "
                f"{tuple(buckets)}; change data.buckets, or choose a backbone with a vision tower"
            )
        block = config.merge_size**2
        if not buckets or any(p < 1 or n < 0 or n % block for p, n in buckets):
            raise ValueError(
                f"buckets must be pairs of (tokens, patches) with patches in multiples of {block}, "
                f"got {tuple(buckets)}; change data.buckets"
            )
        buckets = tuple(sorted((int(p), int(n)) for p, n in buckets))
        if buckets[-1][1] < max(n for _, n in buckets):
            raise ValueError(
                "the bucket with the most tokens must also have the most patches, so that prompts "
                f"that fit one by one also fit together, got {buckets}; change data.buckets"
            )
        self.tokenizer, self.config, self.buckets = tokenizer, config, buckets
        self.min_pixels, self.max_pixels = min_pixels, max_pixels
        self.think_tag = think_tag
        self.system_prompt = system_prompt.replace("{tag}", think_tag)
        self.instruction = instruction.replace("{tag}", think_tag)
        self.patch_dtype = np.dtype(patch_dtype)
        self._template = tokenizer.get_chat_template()
        # Cached: rendering the template is slow, and questions repeat.
        self._chat_of = functools.lru_cache(maxsize=4096)(self._render)
        self._check_template()

    def chat(self, example: Example) -> str:
        """The prompt as text, one image token per image, up to the assistant's turn."""
        num_images, num_placed = len(example.images), example.question.count(IMAGE_PLACEHOLDER)
        if num_images and self.config.vision is None:
            raise ValueError(
                f"example {example.id} of {example.source} has images, and a "
                f"{self.config.family} backbone reads text alone; choose other data, or a backbone "
                "with a vision tower"
            )
        if num_placed != num_images:
            raise ValueError(
                f"example {example.id} of {example.source} has {num_images} images and "
                f"{num_placed} {IMAGE_PLACEHOLDER} in its question; write one for each image"
            )
        try:
            return self._chat_of(example.question)
        except templates.TemplateError as error:
            raise Unusable("the chat template refuses the question", str(error)) from error

    def _render(self, question: str) -> str:
        texts = question.split(IMAGE_PLACEHOLDER)
        if self.instruction:
            texts[-1] = f"{texts[-1]}\n{self.instruction}"
        content = texts[0]  # a text-only template takes no items
        if self.config.vision:
            content = [{"type": "text", "text": texts[0]}]
            for text in texts[1:]:
                content += [{"type": "image"}, {"type": "text", "text": text}]
            content = [item for item in content if item.get("text") != ""]
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        turns = [*system, {"role": "user", "content": content}]
        names = self.tokenizer.special_tokens_map
        is_trusted = self._template == CHAT_TEMPLATE
        return templates.render(self._template, turns, is_trusted=is_trusted, **names)

    def tokenize(self, example: Example) -> TokenizedPrompt:
        """Tokens and patches of one example; raises `Unusable` if an image cannot be read."""
        tokens = self.context_tokens(self.chat(example))
        vision, tower = self.config.vision, FAMILIES[self.config.family].tower
        if vision is None or tower is None:
            return self._without_images(tokens)
        is_image = tokens == self.config.image_token_id
        if is_image.sum() != len(example.images) or np.any(tokens == self.config.video_token_id):
            raise ValueError(
                f"example {example.id} of {example.source} has an image or video token in its "
                f"text; write {IMAGE_PLACEHOLDER} for an image"
            )
        if not example.images:
            return self._without_images(tokens)
        statistics: Any = {"mean": tower.image_mean, "std": tower.image_std}
        settings = {**self._limits(example), **statistics, "dtype": self.patch_dtype}

        def read(image):
            opened = open_image(image)
            return *to_patches(opened, vision, **settings), opened.size

        patches, grids, image_sizes = zip(*map(read, example.images), strict=True)
        grids = np.stack(grids)
        repeats = np.ones(len(tokens), np.int64)
        repeats[is_image] = grids.prod(-1) // vision.merge_size**2
        # Avoid copying megabytes if there is only one image.
        patches = patches[0] if len(patches) == 1 else np.concatenate(patches)
        return TokenizedPrompt(np.repeat(tokens, repeats), grids, patches, image_sizes)

    def measure(self, example: Example) -> tuple[int, int]:
        """Number of tokens and patches that `tokenize` would give; reads only image headers."""
        num_text = len(self.context_tokens(self.chat(example))) - len(example.images)
        vision, limits = self.config.vision, self._limits(example)
        if vision is None:
            return num_text, 0
        factor = vision.patch_size * vision.merge_size
        num_pixels = 0
        for width, height in map(image_size, example.images):
            num_pixels += math.prod(target_size(height, width, factor=factor, **limits))
        num_features = num_pixels // factor**2
        return num_text + num_features, num_features * vision.merge_size**2

    def fits(self, prompt: TokenizedPrompt) -> bool:
        """Whether the prompt fits a bucket."""
        return self.bucket_of(len(prompt.tokens), len(prompt.patches)) is not None

    def bucket_of(self, num_tokens: int, num_patches: int) -> tuple[int, int] | None:
        """The smallest bucket, by tokens and then patches, that fits; None if none does."""
        holding = ((p, n) for p, n in self.buckets if num_tokens <= p and num_patches <= n)
        return next(holding, None)

    @property
    def empty_prompt(self) -> TokenizedPrompt:
        """An empty prompt, for unused rows of a batch."""
        return self._without_images(np.zeros(0, np.int32))

    def batch(
        self,
        prompts: Sequence[TokenizedPrompt],
        sizes: Int[np.ndarray, "N 2"] | None = None,
        *,
        contexts: Sequence[Int[np.ndarray, " _"]] | None = None,
        num_context_tokens: int = 0,
    ) -> Prompts:
        """Pads prompts to the smallest bucket that holds them all.

        Args:
            sizes: tokens and patches of all prompts of the global batch, if `prompts` holds only
                this process's share.
            contexts: forced response tokens after each prompt; all of them are treated as text.
            num_context_tokens: C, space for the contexts in addition to the bucket's P tokens.

        Returns:
            a row of P + C tokens per prompt, in numpy; `images` is None if the batch has no image.
        """
        sizes = prompt_sizes(prompts) if sizes is None else sizes
        if contexts is None:
            contexts = [np.zeros(0, np.int32)] * len(prompts)
        bucket = self.bucket_of(*sizes.max(0).tolist())
        if bucket is None:
            raise ValueError(
                "a batch needs {} tokens and {} patches, but the buckets are {}; leave out prompts "
                "that do not fit or enlarge data.buckets".format(*sizes.max(0), self.buckets)
            )
        num_tokens = bucket[0] + num_context_tokens
        shape = (len(prompts), num_tokens)
        tokens = np.full(shape, self.config.pad_token_id, np.int32)
        is_valid = np.zeros(shape, bool)
        positions = np.zeros((*shape, 3), np.int32)
        next_position = np.zeros(len(prompts), np.int32)
        feature_index = np.full(shape, -1, np.int32)
        for row, (prompt, context) in enumerate(zip(prompts, contexts, strict=True)):
            end = num_tokens - len(context)
            own = slice(end - len(prompt.tokens), end)
            tokens[row, own], tokens[row, end:] = prompt.tokens, context
            is_valid[row, own.start :] = True
            found = prompt_positions(prompt.tokens, prompt.grids, self.config)
            positions[row, own], following = found
            positions[row, end:] = following + np.arange(len(context))[:, None]
            next_position[row] = following + len(context)
            feature_index[row, own] = feature_indices(prompt.tokens, prompt.grids, self.config)
        images = None
        if self.config.vision and sizes[:, 1].any():
            patches, grids = [p.patches for p in prompts], [p.grids for p in prompts]
            images = pack_images(patches, grids, self.config.vision, bucket[1])
        return Prompts(tokens, is_valid, positions, next_position, feature_index, images)

    def context_tokens(self, text: str) -> Int[np.ndarray, " c"]:
        """Tokens of the beginning of a response, without an end-of-sequence token."""
        try:
            tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of `tokenizers` is no Exception
            raise Unusable("the tokenizer cannot read the text", f"{error}") from error
        return np.array(tokens, np.int32)

    def response_tokens(self, text: str) -> Int[np.ndarray, " T"]:
        """Tokens of a response, tags included, and the end of the turn.

        That is the tokenizer's end-of-sequence token, if the backbone has it as one of several: the
        first of Llama 3's ends a document.
        """
        ends, end = self.config.eos_token_ids, self.tokenizer.eos_token_id
        return np.append(self.context_tokens(text), np.int32(end if end in ends else ends[0]))

    def save_processor(self, folder: str | pathlib.Path) -> None:
        """Writes the tokenizer, and with a tower the image processor's settings, as releases do.

        `AutoTokenizer` and `AutoImageProcessor` open the folder, and with torchvision, which its
        video processor requires, `AutoProcessor`.
        """
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save_pretrained(folder)
        vision, tower = self.config.vision, FAMILIES[self.config.family].tower
        if vision is None or tower is None:
            return
        settings = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": tower.processor,
            "do_convert_rgb": True,
            "do_resize": True,
            "resample": int(Image.Resampling.BICUBIC),
            "size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
            "min_pixels": self.min_pixels,
            "max_pixels": self.max_pixels,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(tower.image_mean),
            "image_std": list(tower.image_std),
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "merge_size": vision.merge_size,
        }
        (folder / "preprocessor_config.json").write_text(
            json.dumps(settings, indent=2) + "\n", encoding="utf-8"
        )

    def _check_template(self) -> None:
        """Rejects a template that does not write the question, with one token per image."""
        images, wanted = 2 * IMAGE_PLACEHOLDER, f"write {_IMAGE_TOKEN} for an image"
        advice = (
            "so it may be text-only; put the release's chat_template.json or chat_template.jinja "
            "beside its tokenizer_config.json"
        )
        if self.config.vision is None:
            images, wanted = "", "write the system turn and the question as strings"
            advice = "so it may need items of content; use the release's own template"
        try:
            shown = self._render(f"{images}Which?")
            found = shown.count(_IMAGE_TOKEN)
            is_right = "Which?" in shown and (found == 2 or self.config.vision is None)
            got = f"{found} of them for two images" if images else f"{shown!r:.200}"
        except templates.TemplateError as error:
            is_right, got = False, str(error)
        if not is_right:
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path!r} must {wanted}, got {got}, "
                f"{advice}"
            )

    def check_trained(self) -> None:
        """Rejects a template that opens the rationale, as those of the Thinking releases do.

        Training reads a rationale from its opening tag on, which responses would then lack.
        """
        tags = "|".join({"think", "reasoning", self.think_tag})
        if opened := re.search(rf"<(?:{tags})>\s*$", self._render("Which?")):
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path!r} must leave the rationale's "
                f"opening tag to the response, got a prompt that ends with {opened[0].strip()}; "
                "remove it from a copy of the template, see docs/prompts.md"
            )

    def _limits(self, example: Example) -> dict[str, int]:
        """The pixel range of resized images: the example's, else the builder's."""
        return {
            "min_pixels": example.min_pixels or self.min_pixels,
            "max_pixels": example.max_pixels or self.max_pixels,
        }

    def _without_images(self, tokens: Int[np.ndarray, " L"]) -> TokenizedPrompt:
        patch_dim = self.config.vision.patch_dim if self.config.vision else 0
        patches = np.zeros((0, patch_dim), self.patch_dtype)
        return TokenizedPrompt(tokens, np.zeros((0, 3), np.int32), patches)


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: BackboneConfig) -> None:
    """Checks that image and video tokens have the same ids in the tokenizer and the backbone."""
    for key, token in _IMAGE_TOKENS.items() if config.vision else ():
        expected = getattr(config, key)
        actual = tokenizer.convert_tokens_to_ids(token)
        if actual != expected:
            raise ValueError(
                f"the backbone has {token} at {expected} and the tokenizer at {actual}; use the "
                "tokenizer of the backbone's release, or change the backbone's token ids"
            )
    num_ids = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)
    if num_ids > config.text.vocab_size:
        raise ValueError(
            f"the tokenizer has {num_ids} tokens and the backbone a vocabulary of "
            f"{config.text.vocab_size}; raise the backbone's vocab_size"
        )
