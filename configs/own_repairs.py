"""`configs/repair.py`, where the cue is taught by repairs of the model's own failures.

    python -m care_jax.main --config=configs/own_repairs.py:first --workdir=runs/first
    python -m care_jax.commands.repairs --config=configs/own_repairs.py:first \\
        --workdir=runs/first --stage=sft --questions=4096 --out=data/repairs
    python -m care_jax.main --config=configs/own_repairs.py --workdir=runs/second

In `configs/repair.py` the wrong rationales of the rows that show a repair are drawn like the
teacher's mistakes. Here the first cold start shows none; the failures behind it are sampled, and
are 5% of a second, shorter one, as context that is not learnt. `own_repairs.py:control` is the
second without them: as many steps more on the teacher's responses alone.
"""

from ml_collections import ConfigDict

from configs import common, repair

FIRST = "runs/first"


def get_config(part: str = "second") -> ConfigDict:
    """The first cold start; the second and what follows it; or the second without repairs."""
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
