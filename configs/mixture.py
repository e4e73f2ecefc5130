"""The paper's data (app:dataset) by hub id; a path may also be a folder of the same format.

    python -m care_jax.commands.prepare --config=configs/mixture.py --out=data/train
    python -m care_jax.commands.prepare --config=configs/mixture.py:cold_start --out=data/sft \
        "--config.data.prepare.sources[0].images=IMAGES"

    python -m care_jax.main --config=configs/mixture.py --workdir=runs/7b

The images of Vision-R1-cold come from two other releases, LLaVA-CoT-100k and Mulberry-SFT, in
archives of several parts. Unpack them in one folder, IMAGES. The benchmarks' column names are taken
from public code. MMMU-Pro vision renders the questions of MMMU-Pro standard as images, so only the
latter is compared.
"""

from ml_collections import ConfigDict

from configs import common, qwen25vl_7b

FOLDERS = {"train": "data/train", "cold_start": "data/sft"}


def get_config(part: str = "train") -> ConfigDict:
    """What to prepare, the RL mixture or the cold start; training of Qwen2.5-VL-7B on both."""
    if part not in FOLDERS:
        raise ValueError(f"configs/mixture.py has {' and '.join(FOLDERS)}, not {part!r}")
    config = qwen25vl_7b.get_config()
    data = config.data
    data.prepare.benchmarks = _benchmarks()
    chartqa = {"path": "HuggingFaceM4/ChartQA", "tolerance": 0.05}
    geometry3k = {"path": "hiyouga/geometry3k"}
    data.prepare.sources = {
        "cold_start": (common.source("vision_r1_cold", path="Osilly/Vision-R1-cold"),),
        "train": (
            common.source("chartqa", split="train", subset="human", **chartqa),
            common.source("geometry3k", split="train", **geometry3k),
            common.source("virl39k", path="TIGER-Lab/ViRL39K"),
        ),
    }[part]
    data.train = common.source(
        "mixture",
        parts=tuple(
            common.source("arrayrecord", path=FOLDERS["train"], subset=name)
            for name in ("chartqa-human", "geometry3k", "virl39k")
        ),
    )
    data.sft = common.source("arrayrecord", path=FOLDERS["cold_start"])
    data.test = common.source(
        "mixture",
        parts=(
            common.source("chartqa", split="test", **chartqa),
            common.source("geometry3k", split="test", **geometry3k),
        ),
    )
    config.evaluate.temperature = config.rl.temperature  # as in the paper (app:exp_details)
    return config


def _benchmarks() -> tuple[ConfigDict, ...]:
    def benchmark(path: str, split: str, images: str) -> ConfigDict:
        section = common.source("parquet", path=path, split=split)
        section.columns.update({"question": "question", "answer": "answer", "images": images})
        return section

    several = ",".join(f"image_{number}" for number in range(1, 8))
    return (
        benchmark("AI4Math/MathVista", "testmini", "decoded_image"),
        benchmark("CaraJ/MathVerse-lmmseval", "testmini", "image"),
        benchmark("MathLLMs/MathVision", "test", "decoded_image"),
        benchmark("MMMU/MMMU", "validation", several),
        benchmark("MMMU/MMMU_Pro", "standard (10 options)", several),
    )
