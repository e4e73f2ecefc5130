"""A GGUF file becomes a release that computes what transformers computes from the same weights."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from care_jax import main
from care_jax.aot import dry_run
from care_jax.batch import Example
from care_jax.commands import smollm
from care_jax.data.drawn.word_problems import FAR, KINDS
from care_jax.run.integrity import find_damage
from care_jax.run.policy import policy_of
from configs import common, smollm_words
from models import backbone
from models.attention.packed import causal_reach

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROOT = pathlib.Path(__file__).resolve().parents[3]
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "max_position_embeddings": 512,
}
PROMPTS = (
    "Ann has 17 apples and buys 25 more. How many has she now?",
    "Write one sentence about the sea.",
)
NUM_TOKENS = 12  # written by the real model
VOCABULARY = 3 + 256 + 1  # of the made file
TEXTS = (
    *PROMPTS,
    "It's 3:45pm;  two  spaces, a\n\nblank line,\ttab and trailing ",
    "x1y22z333 -4.5e10 'tis we'll 12,000 $5 50%",
    "naïve café 北京 🙂 ﬁ",
    "<think>Tens: 40 + 70 = 110.</think><answer>123</answer>",
)


def symbols():
    """The 256 symbols of a byte-level tokenizer, as GPT-2 has them."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def llama(vocab_size):
    """transformers' Llama with random weights, whose norms are not all 1."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, vocab_size=vocab_size, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return model


def permuted(kernel, num_heads):
    """Rows of a query or key projection as llama.cpp's convert_hf_to_gguf.py orders them."""
    rows, columns = kernel.shape
    kernel = kernel.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return kernel.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(
    path, model, *, left_out=(), more=(), pre="smollm", architecture="llama", rotary=None
):
    """A GGUF file of a Llama and a tokenizer of single bytes and one merge."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *symbols(), "in"]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
    }.items():
        writer.add_uint32(f"llama.{key}", SHAPE[value])
    writer.add_float32("llama.rope.freq_base", SHAPE["rope_theta"])
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", SHAPE["rms_norm_eps"])
    if rotary:
        writer.add_string("llama.rope.scaling.type", rotary)
    writer.add_rope_dimension_count(SHAPE["hidden_size"] // SHAPE["num_attention_heads"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["i n"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SHAPE["num_hidden_layers"])
    for name, tensor in [*model.state_dict().items(), *more]:
        if name == "lm_head.weight" or name in left_out:
            continue
        array = tensor.numpy()
        for part, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                array = permuted(array, SHAPE[key])
        writer.add_tensor(names.get_name(name, (".weight",)) or name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(transformers' model, the folder written from its GGUF file)."""
    folder = tmp_path_factory.mktemp("small")
    model = llama(VOCABULARY)
    smollm.write_release(write_gguf(folder / "small.gguf", model), folder / "release")
    return model, folder / "release"


def policy_from(folder):
    config = common.get_config()
    config.model.path = str(folder)
    config.data.buckets = ((512, 0),)
    return policy_of(config)


def our_logits(params, config, tokens):
    """Float32 logits [S V] of text alone."""
    tokens = jnp.asarray(tokens)[None]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :, None], (*tokens.shape, 3))
    mask = backbone.text_mask(causal_reach(jnp.zeros(tokens.shape, jnp.int32)), config)
    x = backbone.embed(params, tokens, dtype=jnp.float32)
    hidden, _ = backbone.forward(params, x, positions, mask, config)
    return backbone.unembed(params, hidden, config)[0]


def their_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)[None]).logits[0].numpy()


def test_the_written_decoder_computes_what_the_model_of_the_file_computes(small):
    model, folder = small
    params, config = backbone.load(folder)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 40)
    ours, theirs = our_logits(params, config, tokens), their_logits(model, tokens)
    assert np.abs(theirs).max() > 3
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert (config.family, config.vision, config.text.norm_eps) == ("llama", None, 1e-5)


def test_the_rows_of_a_head_are_put_back_in_halves():
    rows = np.array([[0, 4, 1, 5, 2, 6, 3, 7], [10, 14, 11, 15, 12, 16, 13, 17]], np.float32)
    halves = smollm.rotary_halves(rows.reshape(-1, 1), 2)
    assert halves[:, 0].tolist() == [*range(8), *range(10, 18)]


def test_the_program_opens_the_folder_and_reads_text(small):
    policy = policy_from(small[1])
    assert policy.config.eos_token_ids == (2, 0) and policy.config.pad_token_id == 0
    text = policy.prompts.tokenize(Example("t", "made", (), "11 in 1", "1"))
    assert policy.tokenizer.decode(text.tokens).endswith(
        "<|im_start|>user\n11 in 1\n"
        "First think about the reasoning process inside <think> </think> tags, then give the final "
        "answer inside <answer> </answer> tags.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not find_damage(small[1])


def test_transformers_opens_the_folder(small):
    model = transformers.AutoModelForCausalLM.from_pretrained(small[1])
    assert type(model).__name__ == "LlamaForCausalLM"
    tokenizer = transformers.AutoTokenizer.from_pretrained(small[1])
    assert tokenizer.eos_token_id == 2 and tokenizer.encode("in<|im_end|>") == [259, 2]


@pytest.mark.usefixtures("one_device")
def test_a_run_on_word_problems_goes_dry_from_the_folder(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dry_run, "_CHEAP", 0)  # compiles nothing
    config = smollm_words.get_config()
    config.model.path = str(small[1])
    config.data.buckets = ((256, 0),)  # a token for each byte
    config.rl.max_response_tokens = 256
    assert main.run_stages(config, tmp_path / "run", is_dry=True) == {}
    said = capsys.readouterr().out
    assert "word_problems/total train-1-0: " in said and "tokens, 0 patches" in said
    assert "left out" not in said and "GiB KV caches and slots" in said


@pytest.mark.exhaustive
@pytest.mark.usefixtures("one_device")
def test_a_run_on_word_problems_trains_evaluates_and_exports(small, tmp_path):
    """Text alone through every stage: no image, no patch, and a repair cue that is taught."""
    config = smollm_words.get_config()
    config.stages = ("sft", "evaluate", "rl", "export")
    config.model.path = str(small[1])
    config.data.buckets = ((256, 0),)  # a token for each byte
    config.data.test.num_examples = 14
    config.sft.update(num_steps=3, warmup_steps=1)
    config.rl.update(num_steps=1, warmup_steps=0, max_response_tokens=96)
    config.evaluate.update(batch_size=14, max_response_tokens=32)
    results = main.run_stages(config, tmp_path / "run")
    assert {f"acc/word_problems/{kind}{far}" for kind in KINDS for far in ("", FAR)} <= {
        *results["sft"]
    }
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [(row["stage"], row["step"]) for row in map(json.loads, lines)]
    assert [at for at in steps if at[0] == "sft"] == [("sft", 0), ("sft", 1), ("sft", 2)]
    assert ("rl", 0) in steps
    before, after = (backbone.load(folder)[0] for folder in (small[1], tmp_path / "run/export"))
    table = [params["text"]["embed"]["table"] for params in (before, after)]
    assert np.abs(table[0] - table[1]).max() > 1e-3
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/export")
    theirs = opened.get_input_embeddings().weight.detach().float().numpy()
    np.testing.assert_array_equal(table[1].astype(jnp.bfloat16).astype(np.float32), theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "qwen2"}, "architecture 'llama', got 'qwen2'"),
        ({"pre": "llama-bpe"}, r"tokenizer \('gpt2', 'smollm'\), got \('gpt2', 'llama-bpe'\)"),
        ({"left_out": ("model.norm.weight",)}, r"more or fewer: \['output_norm.weight'\]"),
        ({"more": [("rope_freqs.weight", torch.ones(8))]}, r"fewer: \['rope_freqs.weight'\]"),
        ({"rotary": "linear"}, r"'llama.rope.scaling.type' 'none', got 'linear'"),
    ],
)
def test_a_file_of_another_model_is_refused_by_name(change, message, tmp_path):
    path = write_gguf(tmp_path / "a.gguf", llama(VOCABULARY), **change)
    with pytest.raises(ValueError, match=message):
        smollm.write_release(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gguf=a.gguf"], "expected --out=FOLDER, got none; name the folder to write"),
        (["--out=x", "a.gguf"], "expected only flags, got 'a.gguf'"),
        (["--out=x", "--gguf=absent.gguf"], "--gguf must name a file, got 'absent.gguf'"),
        (["--out=x", f"--gguf={__file__}"], "must be a complete GGUF file, got"),
        (["--out=x", "--into=y"], "into"),
    ],
)
def test_a_wrong_argument_is_one_line(flags, message, tmp_path, monkeypatch, error_of):
    monkeypatch.chdir(tmp_path)
    assert message in error_of(smollm, *flags)
    assert not (tmp_path / "x").exists()


@pytest.mark.exhaustive
def test_the_command_reports_a_wrong_argument_in_one_line():
    command = [sys.executable, "-m", "care_jax.commands.smollm"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: expected --out=FOLDER")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The packaged file, and the release written from it."""
    if importlib.util.find_spec(smollm.PACKAGE) is None:
        pytest.skip(f"needs the model: {smollm.INSTALL}")
    folder = tmp_path_factory.mktemp("smollm")
    smollm.write_release(smollm.packaged_gguf(), folder)
    return smollm.packaged_gguf(), folder


@pytest.mark.exhaustive
def test_the_real_tokenizer_gives_transformers_tokens(real):
    path, folder = real
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        tokens = ours.encode(text, add_special_tokens=False)
        assert tokens == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(tokens) == text


@pytest.mark.exhaustive
def test_the_real_model_gives_transformers_logits_and_greedy_tokens(real):
    path, folder = real
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    policy = policy_from(folder)
    params, config = backbone.load(folder)
    logits_of = jax.jit(lambda params, tokens: our_logits(params, config, tokens))
    example = Example("q", "made", (), PROMPTS[0], "42")
    tokens = policy.prompts.tokenize(example).tokens
    with torch.no_grad():
        length = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
        whole = model.generate(torch.tensor(tokens)[None], do_sample=False, **length)[0].numpy()
    ours, theirs = np.asarray(logits_of(params, whole)), their_logits(model, whole)
    np.testing.assert_allclose(ours, theirs, atol=2e-3)
    written = whole[len(tokens) :]
    end = config.eos_token_ids[0]  # min_new_tokens gives it probability 0
    greedy = np.delete(ours[len(tokens) - 1 : -1], end, axis=-1).argmax(-1)
    assert (greedy + (greedy >= end)).tolist() == written.tolist()
