"""The stock tasks of lmms-eval 0.7, asked in this policy's format and scored on its answer span.

Used by the task files beside it, which lmms-eval finds through `--include_path docs/lmms_eval`.
Each function is the stock one of its name; prompts get the instruction the policy was trained with,
and responses are cut down to their answer before they are scored. Nothing of care_jax is imported,
so that the folder works in an environment of lmms-eval alone.
"""

import importlib
import os
import re

THINK_TAG = os.environ.get("CARE_THINK_TAG", "think")  # "reasoning" for Qwen3-VL
INSTRUCTION = (
    f"First think about the reasoning process inside <{THINK_TAG}> </{THINK_TAG}> tags, then give "
    "the final answer inside <answer> </answer> tags."
)
_TASKS = ("mathvista", "mathverse", "mathvision", "mmmu", "mmmu_pro")
_BOX = re.compile(r"\\(?:boxed|fbox) ?\{")


def unwrap(text: str) -> str:
    """The content of the last answer span, a box in it opened; else what follows the rationale."""
    _, opening, last = text.rpartition("<answer>")
    if not opening or "</answer>" not in last:
        closed = re.split(r"</(?:think|thinking|reasoning)>", text)
        return closed[-1].replace("<answer>", "").strip()
    answer = last.partition("</answer>")[0].strip()
    while match := _BOX.search(answer):
        depth, end = 1, match.end()
        while end < len(answer) and depth:
            depth += {"{": 1, "}": -1}.get(answer[end], 0)
            end += 1
        if depth:
            break
        answer = answer[match.end() : end - 1].strip()
    return re.sub(r"\\(?:text|mathrm|mathbf|textbf|mbox) ?\{([^{}]*)\}", r"\1", answer)


def _stock(task: str, name: str):
    return getattr(importlib.import_module(f"lmms_eval.tasks.{task}.utils"), name)


def _asked(task: str, name: str):
    def doc_to_text(doc, lmms_eval_specific_kwargs=None):
        return f"{_stock(task, name)(doc, lmms_eval_specific_kwargs)}\n{INSTRUCTION}"

    return doc_to_text


def _scored(task: str, name: str):
    def process_results(doc, results):
        return _stock(task, name)(doc, [unwrap(result) for result in results])

    return process_results


def _shown(task: str, name: str):
    def doc_to_visual(doc):
        return _stock(task, name)(doc)

    return doc_to_visual


def _aggregated(task: str, name: str):
    # The stock module is imported when a task is run, not when its file is read.
    def aggregate(results):
        return _stock(task, name)(results)

    return aggregate


for _task in _TASKS:
    for _name, _made in (
        (f"{_task}_doc_to_visual", _shown),
        (f"{_task}_doc_to_text", _asked),
        (f"{_task}_process_results", _scored),
    ):
        globals()[_name] = _made(_task, _name)
mathvision_aggregate_results_eval = _aggregated("mathvision", "mathvision_aggregate_results_eval")
mmmu_aggregate_results = _aggregated("mmmu", "mmmu_aggregate_results")
mmmu_pro_aggregate_results = _aggregated("mmmu_pro", "mmmu_pro_aggregate_results")


def mathvista_aggregate_results(results, args):
    """lmms-eval passes `args` to an aggregation that has a parameter of that name."""
    return _stock("mathvista", "mathvista_aggregate_results")(results, args)


def mathverse_aggregate_results_eval(results, args):
    """As above."""
    return _stock("mathverse", "mathverse_aggregate_results_eval")(results, args)


def mathvista_process_results(doc, results):
    """Letters become their choices, which the stock function takes without asking its judge.

    Without a key to a judge it would take the shortest choice for whatever else it is given.
    """
    texts = [unwrap(result) for result in results]
    choices = doc.get("choices") or []
    for place, text in enumerate(texts):
        letter = text.strip("(). ")
        if len(letter) == 1 and letter in "ABCDEFGH"[: len(choices)]:
            texts[place] = choices["ABCDEFGH".index(letter)]
    return _stock("mathvista", "mathvista_process_results")(doc, texts)


def mmmu_pro_vision_process_results(doc, results):
    """The stock one wants the raw text to equal the letter where the row lists no options."""
    texts = [unwrap(result) for result in results]
    if "options" not in doc:
        texts = [re.sub(r"^\W*([A-J])\b.*$", r"\1", text, flags=re.DOTALL) for text in texts]
    return _stock("mmmu_pro", "mmmu_pro_process_results")(doc, texts)
