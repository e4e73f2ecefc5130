"""`configs/repair.py`, where the cue is taught by repairs of the model's own failures.

    python -m care_jax.main --config=configs/own_repairs.py:first --workdir=runs/first
    python -m care_jax.repairs --config=configs/own_repairs.py:first --workdir=runs/first \\
        --stage=sft --questions=4096 --out=data/repairs
    python -m care_jax.main --config=configs/own_repairs.py --workdir=runs/second

In `configs/repair.py` the wrong rationales of the rows that show a repair are drawn like the
teacher's mistakes. Here the first cold start shows none; the failures behind it are sampled, and
are 5% of a second, shorter one, as context that is not learnt.
"""

from ml_collections import ConfigDict

from configs import common, repair

FIRST = "runs/first"


def get_config(part: str = "second") -> ConfigDict:
    """The first cold start, or the second and what follows it."""
    if part not in ("first", "second"):
        raise ValueError(f"configs/own_repairs.py has first and second, not {part!r}")
    config = repair.get_config()
    config.data.cue_share = 0.0
    if part == "first":
        config.stages = ("sft", "export")
        return config
    config.model.path, config.model.backbone = f"{FIRST}/export", {}
    config.data.sft = common.source(
        "mixture",
        parts=(
            common.source("readings", num_examples=65536, seed=4, weight=0.95),
            common.source("arrayrecord", path="data/repairs", weight=0.05),
        ),
    )
    config.sft.num_steps = 400
    return config
