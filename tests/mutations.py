"""One-line mistakes, each of which a test must notice: a measure of what the tests guard.

    python -m tests.mutations [--only=SUBSTRING] [--jobs=1]

Makes one mistake at a time in a copy of the tracked files and runs the tests that should fail. A
mutation is killed if one does. The exit status is 1 if a mutation survives or pytest cannot run.
`mutations_test.py` checks that all mutations still apply.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import dataclasses
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAX_SECONDS = 1800  # of one pytest session


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One mistake, in one line."""

    file: str
    old: str  # occurs once in the file
    new: str
    tests: tuple[str, ...]  # files or node ids, under tests/
    breaks: str

    def __str__(self) -> str:
        return f"{self.file}: {self.breaks}"


def _of(file: str, tests: str, *changes: tuple[str, str, str]) -> Iterator[Mutation]:
    """Mutations (old, new, breaks) of one file, which the same tests should kill."""
    for old, new, breaks in changes:
        yield Mutation(file, old, new, tuple(tests.split()), breaks)


# fmt: off
MUTATIONS = (
    *_of(
        "care_jax/method/advantages.py", "care_jax/method/advantages_test.py",
        ("jnp.abs(raw.value), raw.value)", "jnp.abs(raw.value), scale * raw.value)",
         "s also scales positives"),
        ("jnp.sqrt(jnp.maximum(K / jnp.maximum(num_negatives, 1), 1.0))",
         "jnp.maximum(K / jnp.maximum(num_negatives, 1), 1.0)",
         "equalisation by K/K_S, without the root"),
        ("(is_anchor, delta, -delta / num_chosen)", "(is_anchor, -delta, delta / num_chosen)",
         "the sign of the rescue's δ"),
        ("jnp.maximum(number - ddof, 1)", "jnp.maximum(number - 1, 1)",
         "the sample σ in place of the population σ"),
        ("is_failed_repair) & is_below", "is_failed_repair)",
         "a failure with no less reward than the anchor is a negative"),
    ),
    *_of(
        "care_jax/method/select.py", "care_jax/method/select_test.py",
        ("order = num_answer, num_think", "order = num_answer, -num_think",
         "the anchor is the longest success"),
        ("_least(to_anchor, is_eligible, M)", "_least(-to_anchor, is_eligible, M)",
         "the candidates are the farthest failures"),
    ),
    *_of(
        "care_jax/method/objective.py", "care_jax/method/objective_test.py",
        ("(ratio, 1 - clip_low, 1 + clip_high)", "(ratio, 1 - clip_high, 1 + clip_low)",
         "the clip bounds are swapped"),
        ("return jnp.expm1(d) - d", "return jnp.expm1(-d) + d",
         "k3 of the inverse ratio"),
        ("(sums / jnp.maximum(counts, 1))[index]", "sums[index]",
         "GSPO's ratio is the product over tokens, not the geometric mean"),
        ("jnp.maximum(clipped, dual_clip * a)", "jnp.minimum(clipped, dual_clip * a)",
         "the dual clip bounds from above"),
    ),
    *_of(
        "care_jax/method/credit.py", "care_jax/method/credit_test.py",
        ("jnp.sum(num_tokens * is_kept, 1)", "jnp.sum(num_tokens, 1)",
         "DAPO's token mean counts the tokens of dropped groups"),
        ("is_sampled = rollouts.is_valid & ~rollouts.is_forced", "is_sampled = rollouts.is_valid",
         "the failed rationale and the cue are trained on"),
        ("(scores.reward > 0)", "(scores.reward >= 0)",
         "with care.success reward every answer is a success"),
    ),
    *_of(
        "care_jax/commands/gradients.py", "care_jax/commands/gradients_test.py",
        ("(products.sum() - np.trace(products))", "products.sum()",
         "gradients are compared with their own noise"),
    ),
    *_of(
        "care_jax/method/spans.py", "care_jax/method/spans_test.py",
        ("is_answer[-1] |= is_complete", "is_answer[-1] |= False",
         "EOS is outside the answer span"),
    ),
    *_of(
        "care_jax/learning/train_step.py",
        "care_jax/learning/train_step_layout_test.py::test_microbatches_change_nothing",
        ("-terms.sum() / total_weight", "-terms.sum() / jnp.maximum(batch.prompt_weight.sum(), 1)",
         "the loss has a denominator per microbatch"),
    ),
    *_of(
        "care_jax/learning/train_step.py",
        "care_jax/learning/train_step_test.py"
        "::test_loss_and_metrics_are_the_formulas_with_hand_made_sums",
        ("kl_of(logp, batch.ref_logp), 0.0)", "kl_of(logp, batch.old_logp), 0.0)",
         "the KL is to the policy that sampled"),
        ("if objective.has_token_kl:", "if not objective.has_token_kl:",
         "a baseline's KL is the mean over tokens, CARE's that of the surrogate"),
    ),
    *_of(
        "care_jax/learning/train_step.py",
        "care_jax/learning/train_step_layout_test.py"
        "::test_packing_and_microbatches_change_nothing_under_any_baseline",
        ("jax.vmap(sequence_log_ratio)(logp, old_logp, mask, branch)",
         "jax.lax.stop_gradient(jax.vmap(sequence_log_ratio)(logp, old_logp, mask, branch))",
         "no gradient flows through GSPO's ratio"),
    ),
    *_of(
        "care_jax/learning/logprobs.py", "care_jax/learning/logprobs_test.py",
        ("jnp.cumsum(is_scored, axis=1) - 1, 0)", "jnp.cumsum(is_scored, axis=1), 0)",
         "a token gets the log-probability of the next"),
    ),
    *_of(
        "care_jax/learning/blocked_softmax.py", "care_jax/learning/blocked_softmax_test.py",
        ("row < size - (num_blocks - 1 - n) * width, ids, -1", "row >= 0, ids, -1",
         "ids of two blocks are counted twice"),
    ),
    *_of(
        "care_jax/learning/optimizer.py", "care_jax/learning/optimizer_test.py",
        ("optax.clip_by_global_norm(max_grad_norm)", "optax.clip(max_grad_norm)",
         "gradients are clipped by entry, not by norm"),
        ("weight_decay=weight_decay)",
         "weight_decay=weight_decay, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))",
         "biases and norm scales are not decayed"),
    ),
    *_of(
        "care_jax/decoding/sampling.py", "care_jax/decoding/sampling_test.py",
        ("jnp.where(weights >= least, weights", "jnp.where(weights > least, weights",
         "top-p drops the token that reaches p"),
        ("temperature * jnp.log(weight)", "jnp.log(weight)",
         "log-probabilities are at the sampling temperature"),
    ),
    *_of(
        "care_jax/decoding/sampler.py",
        "care_jax/decoding/sampler_test.py"
        "::test_log_probabilities_are_the_trainers_own_whatever_the_sampling",
        ("(steps_ago <= slots.num_read[..., None])", "(steps_ago < slots.num_read[..., None])",
         "a row does not attend to its first token"),
    ),
    *_of(
        "care_jax/decoding/sampler.py",
        "care_jax/decoding/sampler_test.py"
        "::test_each_end_of_sequence_id_ends_a_row_and_padding_does_not",
        ("is_eos = jnp.isin(token, jnp.array(config.eos_token_ids))",
         "is_eos = token == config.eos_token_ids[0]",
         "only the first of the EOS ids ends a response"),
    ),
    *_of(
        "care_jax/decoding/sampler.py",
        "care_jax/decoding/sampler_test.py"
        "::test_embedding_is_the_mean_state_up_to_the_end_of_the_rationale",
        ("(slots.tag_state < closing_tag.shape[0] - 1)", "(slots.tag_state < closing_tag.shape[0])",
         "the embedding includes the answer"),
    ),
    *_of(
        "care_jax/decoding/sampler.py",
        "care_jax/decoding/queue_test.py::test_tokens_do_not_depend_on_the_schedule",
        ("slots.num_steps % slots.cache.values[0].shape[-2],", "slots.num_steps,",
         "writes to the KV cache do not wrap around"),
    ),
    *_of(
        "care_jax/decoding/schedule.py",
        "care_jax/decoding/queue_test.py::test_tokens_do_not_depend_on_the_schedule",
        ("source[shard, donor] if source[shard, donor] >= 0 else donor", "donor",
         "a slot takes over rollouts from one that holds another prompt yet"),
    ),
    *_of(
        "care_jax/decoding/simulation.py", "care_jax/decoding/schedule_test.py",
        ("num_idle = refill.num_idle(*state())", "num_idle = (0, 0)",
         "slots that are idle when a call begins are not counted"),
    ),
    *_of(
        "care_jax/decoding/reflection.py", "care_jax/decoding/reflection_test.py",
        ('encode(f"<{think_tag}>{rationale}")[:max_context] + cue_tokens',
         '(encode(f"<{think_tag}>{rationale}") + cue_tokens)[:max_context]',
         "a long rationale truncates the cue"),
    ),
    *_of(
        "care_jax/packing/layout.py", "care_jax/packing/layout_test.py",
        ("index - offset + length - 1, index)", "index - offset + length, index)",
         "the next response's first token attends to a response"),
        ("(following + offset[row, end:stop])", "(following + np.arange(stop - end))",
         "positions continue from one response to the next"),
        ("np.where(feature >= 0, feature + num_features, -1)", "feature",
         "every prompt of a row gets the first prompt's image"),
        ("np.cumsum(offset == 0, axis=1)", "np.cumsum(offset == 0, axis=0)",
         "responses are numbered along the wrong axis"),
    ),
    *_of(
        "care_jax/packing/layout.py",
        "care_jax/learning/train_step_layout_test.py::test_packing_changes_nothing",
        ("sums[row] += values[part.tree] * share", "sums[row] += values[part.tree]",
         "a split prompt counts twice in the denominator"),
    ),
    *_of(
        "care_jax/packing/trees.py", "care_jax/packing/plan_test.py",
        ("(1 << int(room) + 1)", "(1 << int(room))",
         "branches never fill a row to its last token"),
    ),
    *_of(
        "models/layers.py", "models/layers_test.py",
        ("np.repeat(np.arange(3), config.mrope_section)",
         "np.repeat(np.arange(3)[::-1], config.mrope_section[::-1])",
         "the M-RoPE sections are in reverse order"),
        ("[a * cos - b * sin, b * cos + a * sin]", "[a * cos + b * sin, b * cos - a * sin]",
         "the sign of rotate_half"),
    ),
    *_of(
        "models/layers.py", "models/parity_test.py::test_logits_equal_transformers",
        ("share * frequencies + (1 - share) * frequencies / scaling.factor",
         "(1 - share) * frequencies + share * frequencies / scaling.factor",
         "Llama's high frequencies are stretched in place of its low ones"),
    ),
    *_of(
        "models/experts.py", "models/experts_test.py",
        ("share / share.sum(-1, keepdims=True), chosen", "share, chosen",
         "the shares of the chosen experts are not renormalised"),
        ("jnp.where(routes >= 0, routes, own)", "own",
         "replayed routes are ignored"),
        ("(chosen - first).reshape(-1)", "chosen.reshape(-1)",
         "a device takes its experts for the first ones"),
    ),
    *_of(
        "models/grouped.py", "models/grouped_test.py",
        ("jnp.where(is_grouped, d_lhs, 0)", "d_lhs + 1 * is_grouped",
         "the gradient of grouped rows is off by one"),
    ),
    *_of(
        "care_jax/decoding/rollout_buffer.py", "care_jax/decoding/sampler_test.py",
        ('self._arrays["routes"][*target[:2], index - 1]',
         'self._arrays["routes"][*target[:2], index]',
         "a token's route is stored at the next token"),
    ),
    *_of(
        "models/attention/kernels.py", "models/attention/packed_test.py",
        ("a.reshape(num_tokens, -1, G, head_dim).sum(2)",
         "a.reshape(num_tokens, G, -1, head_dim).sum(1)",
         "gradients of keys are summed over kv heads"),
    ),
    *_of(
        "care_jax/devices/placement.py", "care_jax/devices/experts_sharding_test.py",
        ("jax.lax.axis_index(expert_axes) * whole[0].shape[0]", "jax.lax.axis_index(expert_axes)",
         "devices number their experts by device"),
    ),
    *_of(
        "care_jax/rewards/symbolic.py", "care_jax/rewards/symbolic_test.py",
        ("(is_late and comparison in self._late)", "is_late",
         "a timeout is believed at once"),
    ),
    *_of(
        "care_jax/rewards/symbolic.py", "care_jax/rewards/answers_test.py",
        ("lowercase_symbols=False", "lowercase_symbols=True",
         "m and M are one variable"),
    ),
    *_of(
        "care_jax/data/readers/fields.py", "care_jax/data/readers/jsonl_test.py",
        ("value.lower().endswith", "value.endswith",
         "an image in another field is not noticed if its suffix has capitals"),
    ),
    *_of(
        "care_jax/run/checkpoint.py", "care_jax/run/checkpoint_test.py",
        ("            if self._is_retry:", "            if False:",
         "a second failed save in a row is forgotten"),
    ),
    *_of(
        "care_jax/run/space.py", "care_jax/run/space_test.py",
        ("num_kept - len(saved)", "num_kept",
         "checkpoints that are there already need room again"),
    ),
    *_of(
        "care_jax/stages/rl.py", "carried_over_test.py",
        ("carried = left", "_ = left",
         "an update has the slots of two steps in memory"),
    ),
    *_of(
        "care_jax/stages/answering.py", "care_jax/stages/evaluate_again_test.py",
        ("mixed = bits + place *", "mixed = bits + 0 * place *",
         "the checksum of weights is the same for any order of them"),
    ),
    *_of(
        "care_jax/benchmarks/samples.py", "care_jax/stages/evaluate_again_test.py",
        ("if others and not found:", "if others and found:",
         "samples of other settings are overwritten"),
    ),
    *_of(
        "care_jax/stages/rl.py", "care_jax/stages/rl_test.py",
        ("if on_devices is None:", "if on_devices is None and parts is None:",
         "an update without any response is called"),
    ),
    *_of(
        "care_jax/batch.py", "care_jax/rl/rollout_test.py",
        ("acc=np.where(is_judged, self.scores.acc, np.float32(0.5)),", "acc=self.scores.acc,",
         "a response that was not judged is a failure"),
    ),
    *_of(
        "care_jax/rl/carry_over.py", "carried_over_test.py",
        ("if any(distributed.gather_json(is_other)):", "if is_other is None:",
         "unfinished rollouts go on behind other prompts"),
    ),
    *_of(
        "care_jax/method/credit.py", "care_jax/method/credit_test.py",
        ("(scores.acc == 0) | (scores.acc == 1)", "scores.acc >= 0",
         "a response that was not judged may be a success by its reward"),
    ),
    *_of(
        "care_jax/method/diagnostics.py", "care_jax/method/diagnostics_test.py",
        ("np.flatnonzero(raw.is_negative[group])", "np.flatnonzero(subgroup.is_negative[group])",
         "the signature counts failures that A_raw leaves out"),
    ),
    *_of(
        "care_jax/rl/update_batch.py", "care_jax/rl/update_batch_test.py",
        ('run.config.rl.old_logp == "sampler":', 'run.config.rl.old_logp == "none":',
         "the trainer recomputes π_old of all rows under prompt_only"),
    ),
    *_of(
        "care_jax/main.py", "care_jax/main_test.py",
        ("if any(rows != found[0] for rows in found):", "if any(rows is None for rows in found):",
         "processes may have different rows"),
    ),
    *_of(
        "care_jax/run/run.py", "care_jax/run/run_test.py",
        ("streams.ADAPTERS[stage]", 'streams.ADAPTERS["sft"]',
         "cold start and RL draw the same adapters"),
    ),
    *_of(
        "care_jax/run/weights.py", "care_jax/run/weights_test.py",
        ("if saved.latest_whole_step() != section.num_steps:", "if not saved.latest_whole_step():",
         "a stage whose last checkpoint is damaged is finished"),
    ),
    *_of(
        "care_jax/rl/dynamic_sampling.py", "care_jax/rl/dynamic_sampling_test.py",
        ("len(draws) * _MOST_STEPS", "len(draws) * run.config.rl.num_steps",
         "further draws of batches depend on the length of the run"),
    ),
    *_of(
        "care_jax/prompts/builder.py", "care_jax/prompts/text_only_test.py",
        ("np.int32(end if end in ends else ends[0])", "np.int32(ends[0])",
         "a taught response ends with the end of a document"),
    ),
    *_of(
        "models/positions.py", "models/positions_test.py",
        ("row * across[images, 1] + column", "row * across[images, 0] + column",
         "two windows of an oblong image get the same number"),
        ("position += int(max(height, width))", "position += int(height * width)",
         "after an image, positions advance by its area"),
    ),
    *_of(
        "models/attention/packed.py",
        "models/decoder_test.py::test_decoding_equals_the_full_forward",
        ("(mask.first[:, None] <= tokens)", "(mask.first[:, None] < tokens)",
         "the causal mask is strict"),
    ),
    *_of(
        "models/decoder.py", "models/decoder_test.py::test_decoding_equals_the_full_forward",
        ("q.reshape(*q.shape[:-2], config.num_kv_heads, -1, config.head_dim)",
         "q.reshape(*q.shape[:-2], -1, config.num_kv_heads, config.head_dim).swapaxes(-3, -2)",
         "query heads are grouped with the wrong kv head"),
    ),
    *_of(
        "models/decoder.py", "models/parity_test.py::test_logits_equal_transformers",
        ('rms_norm(p["q_norm"], q', 'rms_norm(p["k_norm"], q',
         "queries are normalised with the scale of the keys"),
    ),
    *_of(
        "models/lora.py", "models/lora_test.py",
        ("alpha / rank, jnp.float32)", "alpha, jnp.float32)",
         "LoRA is scaled by α, not α/rank"),
    ),
)
# fmt: on


def problems(mutations: Iterable[Mutation] = MUTATIONS) -> list[str]:
    """What keeps mutations from being applied or tests from being found, a line each."""
    found = []
    for mutation in mutations:
        source = (ROOT / mutation.file).read_text()
        count = source.count(mutation.old)
        if count != 1 or "\n" in mutation.old + mutation.new:
            found.append(f"{mutation}: expected {mutation.old!r} once, in one line; found {count}")
            continue
        try:
            tree = ast.parse(source.replace(mutation.old, mutation.new))
        except SyntaxError as error:
            found.append(f"{mutation}: the mutated file is not Python: {error}")
            continue
        if ast.dump(tree) == ast.dump(ast.parse(source)):
            found.append(f"{mutation}: {mutation.new!r} changes no code")
        for test in mutation.tests:
            file, _, name = test.partition("::")
            path = ROOT / "tests" / file
            if not path.exists() or (name and f"def {name}(" not in path.read_text()):
                found.append(f"{mutation}: no test tests/{test}")
    return found


class Copy:
    """The tracked files in a folder of their own, with the test data beside them."""

    def __init__(self, folder: pathlib.Path):
        self._root = folder / "checkout"
        listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        for name in listed.split("\0"):
            if (ROOT / name).is_file():
                (self._root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self._root / name)
        if (ROOT.parent / "shared").is_dir():
            (folder / "shared").symlink_to((ROOT.parent / "shared").resolve())
        # No bytecode: it would be stale after a change of neither the size nor the second.
        self._env = os.environ | {"PYTHONPATH": str(self._root), "PYTHONDONTWRITEBYTECODE": "1"}
        code = "import care_jax, models.layers; print(care_jax.__file__, models.layers.__file__)"
        imported = self._python("-c", code).stdout.split()
        if not imported or not all(name.startswith(f"{self._root}/") for name in imported):
            raise SystemExit(f"expected imports from {self._root}, got {imported}")

    def _python(self, *args: str) -> subprocess.CompletedProcess[str]:
        output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        where = dict(cwd=self._root, env=self._env)
        return subprocess.run([sys.executable, *args], **output, **where, timeout=MAX_SECONDS)

    def test(self, tests: Iterable[str]) -> subprocess.CompletedProcess[str]:
        """Runs tests until one fails."""
        paths = (f"tests/{test}" for test in tests)
        return self._python("-m", "pytest", "-x", "-q", "--tb=line", *paths)

    def outcome(self, mutation: Mutation) -> tuple[str, str]:
        """`killed`, `survived` or `error`; the test that failed, or what went wrong."""
        path = self._root / mutation.file
        source = path.read_text()
        path.write_text(source.replace(mutation.old, mutation.new))
        try:
            done = self.test(mutation.tests)
        except subprocess.TimeoutExpired:
            return "error", f"the tests ran for more than {MAX_SECONDS} s"
        finally:
            path.write_text(source)
        if done.returncode == 0:
            return "survived", ", ".join(mutation.tests)
        # 1: a test failed. 2 to 5: none was collected, which says nothing about the tests.
        failed = re.search(r"^(?:FAILED|ERROR) \S+::(.+?)(?: - |$)", done.stdout, re.MULTILINE)
        if done.returncode == 1 and failed:
            return "killed", failed[1]
        return "error", f"pytest exited with {done.returncode}\n{done.stdout}"


def main(only: str, jobs: int) -> int:
    """Tries the mutations whose line contains `only`; the exit status."""
    if found := problems():
        print("\n".join(found))
        return 1
    if not (chosen := [mutation for mutation in MUTATIONS if only in str(mutation)]):
        print(f"no mutation's file or phrase contains {only!r}")
        return 1
    tests = sorted({test for mutation in chosen for test in mutation.tests})
    with tempfile.TemporaryDirectory() as folder:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for job in range(jobs):
            copies.put(Copy(pathlib.Path(folder) / str(job)))

        def tried(mutation: Mutation) -> str:
            copy, start = copies.get(), time.monotonic()
            try:
                outcome, detail = copy.outcome(mutation)
            finally:
                copies.put(copy)
            seconds = f"{time.monotonic() - start:5.0f} s"
            print(f"{outcome:8} {seconds}  {mutation} ({detail})", flush=True)
            return outcome

        copy, start = copies.get(), time.monotonic()
        if (done := copy.test(tests)).returncode:
            print(f"{done.stdout}\nThese tests must pass before anything is mutated.")
            return 1
        print(f"{'passed':8} {time.monotonic() - start:5.0f} s  without a mutation", flush=True)
        copies.put(copy)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            outcomes = list(pool.map(tried, chosen))
    print(f"{len(outcomes)} mutations, {outcomes.count('survived')} survived")
    return int(set(outcomes) != {"killed"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="those whose file or phrase contains this")
    parser.add_argument("--jobs", type=int, default=1, help="copies that run tests at a time")
    sys.exit(main(**vars(parser.parse_args())))
