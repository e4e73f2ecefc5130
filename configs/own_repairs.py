"""`configs/repair.py`, with a cold start on repairs of failures sampled from the model.

    python -m care_jax.main --config=configs/own_repairs.py:first --workdir=runs/first
    python -m care_jax.commands.repairs --config=configs/own_repairs.py:first \\
        --workdir=runs/first --stage=sft --questions=4096 --out=data/repairs
    python -m care_jax.main --config=configs/own_repairs.py --workdir=runs/second

In `configs/repair.py` the failed rationales that precede the cue are drawn from the teacher's error
distribution. Here they are sampled from the model after a first cold start without repairs. A
second, shorter cold start has 5% repairs, with the failed rationale as untrained context.
`own_repairs.py:control` is the second cold start without repairs.
"""

from ml_collections import ConfigDict

from configs import common, repair

FIRST = "runs/first"


def get_config(part: str = "second") -> ConfigDict:
    """The first cold start, or the second one (with or without repairs) followed by RL."""
    if part not in ("first", "second", "control"):
        raise ValueError(f"configs/own_repairs.py has first, second and control, not {part!r}")
    config = repair.get_config()
    config.data.cue_share = 0.0
    if part == "first":
        config.stages = ("sft", "export")
        return config
    config.model.path, config.model.backbone = f"{FIRST}/export", {}
    config.sft.num_steps = 400
    drawn = {"num_examples": 65536, "seed": 4}
    if part == "control":
        config.data.sft = common.source("readings", **drawn)
        return config
    config.data.sft = common.source(
        "mixture",
        parts=(
            common.source("readings", **drawn, weight=0.95),
            common.source("arrayrecord", path="data/repairs", weight=0.05),
        ),
    )
    return config
