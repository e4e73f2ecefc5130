"""The policy that a checkpoint is of."""

import json

import numpy as np
import pytest

from care_jax.run.policy import Policy, check_policy
from care_jax.run.progress import read_progress
from configs import tiny
from models.release import config_json


def test_checkpoints_of_earlier_layouts_of_the_config_are_read(tmp_path):
    """Of configs/tiny.py: the decoder's settings under "text", and beside the others."""
    shared = {"bos_token_id": 632, "eos_token_id": 634, "pad_token_id": 632}
    shared["tie_word_embeddings"] = True
    saved = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **shared,
        **{"image_token_id": 638, "video_token_id": 639},
        **{"vision_start_token_id": 635, "vision_end_token_id": 636},
    }
    vision = {
        **{"model_type": "qwen2_5_vl_vision", "tokens_per_second": 2, "hidden_act": "silu"},
        **{"depth": 1, "hidden_size": 96, "intermediate_size": 192, "num_heads": 4},
        **{"out_hidden_size": 96, "patch_size": 8, "temporal_patch_size": 2},
        **{"spatial_merge_size": 2, "window_size": 64, "fullatt_block_indexes": [0]},
        "in_channels": 3,
    }
    text = {
        **{"model_type": "qwen2_5_vl_text", "hidden_act": "silu", "use_sliding_window": False},
        **{"num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 256},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 640},
        **{"rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 1e4},
        **{"rope_scaling.type": "mrope", "rope_scaling.mrope_section": [4, 4, 4]},
        **shared,
    }
    ids = {name: value for name, value in saved.items() if name.endswith("_id")}
    fields = {**tiny.get_config().model.backbone.to_dict(), **ids}
    fields["text_config"] |= {"vocab_size": 640}
    config = config_json.from_hf(fields)
    policy = Policy(config, None, None, [], np.zeros((0, 0), np.uint8), "think", None)
    ours = policy.fingerprint()
    nested = {f"text.{name}": value for name, value in text.items()}
    for decoder in (nested, {name: x for name, x in text.items() if name != "model_type"}):
        old = saved | {f"vision.{name}": value for name, value in vision.items()} | decoder
        progress = tmp_path / "old" / "1" / "progress"
        progress.mkdir(parents=True, exist_ok=True)
        (progress / "metadata").write_text(json.dumps({"fingerprint": old}))
        assert read_progress(tmp_path / "old", 1, ours)["fingerprint"] == old
        old["vision.hidden_size"] = 97
        (progress / "metadata").write_text(json.dumps({"fingerprint": old}))
        with pytest.raises(ValueError, match=r"of another model: vision.hidden_size \(checkpoint"):
            read_progress(tmp_path / "old", 1, ours)


@pytest.mark.parametrize(
    ("stages", "is_refused"),
    [(("rl", "evaluate"), True), (("sft",), True), (("evaluate",), False), (("export",), False)],
)
def test_a_template_that_opens_the_rationale_is_refused_to_train(
    policy, monkeypatch, stages, is_refused
):
    """A Thinking release is evaluated with its own template."""
    monkeypatch.setattr(policy.prompts, "_render", lambda question: f"{question}<think>\n")
    config = tiny.get_config()
    config.stages = stages
    if is_refused:
        with pytest.raises(ValueError, match="must leave the rationale's opening tag to the resp"):
            check_policy(config, policy)
    else:
        check_policy(config, policy)
