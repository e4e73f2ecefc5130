"""Stand-ins for the programs of a step, and the groups they leave, for tests of its host side."""

from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np

from care_jax.batch import Credit, Groups, Scores
from care_jax.prompts.builder import prompt_sizes
from care_jax.stages.rl import UpdatePrograms

STEPS, B, R, T = 4, 4, 3, 9


def make_step(workdir, stage, step):
    """The folder of a checkpoint with nothing but the file that says it is whole."""
    folder = workdir / "checkpoints" / stage / f"{step}"
    folder.mkdir(parents=True)
    (folder / "commit_success.txt").touch()
    return folder


def groups_of(rollouts, seed=0, questions=None):
    """Groups of B prompts; no two numbers in them are alike."""
    rng = np.random.default_rng(seed)
    shape = rollouts.tokens.shape
    acc = rng.permutation(np.arange(B * R) % 2).reshape(B, R).astype(np.float32)
    scores = Scores(
        acc=acc,
        fmt=np.ones((B, R), np.float32),
        reward=0.9 * acc + 0.1,
        is_think=rng.random(shape) < 0.5,
        is_answer=rng.random(shape) < 0.5,
        num_think=np.full((B, R), 2),
        num_answer=np.full((B, R), 1),
        has_answer=np.ones((B, R), bool),
    )
    reasons = np.array([[f"reason {seed}.{b}.{r}" for r in range(R)] for b in range(B)], object)
    return (questions or Groups(index=np.arange(B))).replace(
        rollouts=jax.tree.map(np.asarray, rollouts),
        scores=scores,
        has_reflection=np.zeros(B, bool),
        texts=np.full((B, R), "<answer>1</answer>", object),
        reasons=reasons,
    )


def credit_of(shape, seed=0):
    rng = np.random.default_rng(seed)
    return Credit(
        advantage=rng.normal(size=shape[:2]),
        token_advantage=rng.normal(size=shape),
        row_weight=rng.random(shape[:2]),
        prompt_weight=rng.random(shape[0]),
        is_trained=rng.random(shape) < 0.5,
    )


def scripted_update(**programs):
    """UpdatePrograms of which a test gives some; the others must not be called."""
    names = ("to_decode_layout", "credit", "raw_advantages", "score", "nll", "update")
    return UpdatePrograms(**{name: programs.get(name) for name in names})


def trees_of(batch):
    """The prompts of a batch, each with the responses behind it in any of its rows."""
    rows, found = jax.tree.map(np.asarray, batch.rows), defaultdict(list)
    for tokens, branch, reach in zip(rows.tokens, rows.branch, rows.reach, strict=True):
        ends = sorted({int(end) for end in reach[branch < 0] if branch[end] >= 0})
        start = 0
        for end in ends:
            own, of = tokens[start : end + 1], branch[start : end + 1]
            branches = [own[of == b].tolist() for b in sorted(set(of[of >= 0]))]
            found[tuple(own[of < 0].tolist())] += branches
            start = end + 1
    return {prompt: sorted(rows) for prompt, rows in found.items()}


class Script:
    """Stands in for rollout and programs: an update adds 1 to parameters that start at 0 and 10."""

    loss = 1.0  # of every state on the last batch

    def __init__(self, responses, dies_at=None):
        self.responses, self.dies_at = responses, dies_at
        self.seen = defaultdict(list)

    def roll_out(self, run, programs, params, rng, questions, verifier, carried=None):
        step = len(self.seen["rng"])
        if step == self.dies_at:
            raise KeyboardInterrupt
        self.seen["rng"].append(jax.random.key_data(rng).tolist())
        self.seen["decoded_with"].append(float(params["text"]["w"]))
        self.seen["examples"].append([example.id for example in questions.examples])
        self.seen["prompts"].append([prompt.tokens.tolist() for prompt in questions.prompts])
        assert questions.index.tolist() == list(range(B))
        assert questions.sources.tolist() == ["made"] * B
        np.testing.assert_array_equal(questions.sizes, prompt_sizes(questions.prompts))
        verifier.verify(["<answer>1</answer>"] * 3, ["1"] * 3)
        groups = groups_of(self.responses, step, questions)
        is_forced = groups.rollouts.is_valid & (np.arange(R) == 1)[:, None] & (np.arange(T) < 2)
        return groups.replace(rollouts=groups.rollouts.replace(is_forced=is_forced))

    def score(self, params, batch):
        self.seen["reference"].append(float(params["text"]["w"]))
        return jnp.full(batch.rows.tokens.shape, params["text"]["w"])

    def update(self, state, batch):
        self.seen["updated"].append(trees_of(batch))
        loss = state.params["text"]["w"]
        metrics = {"loss": loss, "grad_norm": jnp.where(loss < 11.5, 1.5, 0.5)}  # most: 1
        params = jax.tree.map(lambda x: x + 1, state.params)
        logp = jnp.full(batch.rows.tokens.shape, -9.0 - len(self.seen["updated"]))
        return state.replace(params=params, step=state.step + 1), metrics, logp

    def programs(self):
        return scripted_update(
            to_decode_layout=lambda params: params,
            credit=lambda rollouts, scores: credit_of(rollouts.tokens.shape),
            score=self.score,
            nll=lambda params, batch: jnp.float32(self.loss),
            update=self.update,
        )


LOOP = {
    "seed": 3,
    "checkpoint_every": 2,
    "rl.objective": "grpo",
    "rl.num_steps": STEPS,
    "rl.num_rollouts": R,
    "rl.prompts_per_step": B,
    "rl.prompts_per_update": 2,
    "grpo.beta": 0.1,
    "rl.warmup_steps": 5,
    "rl.learning_rate": 0.5,
    "log_every": 2,
    "report.groups_per_step": 2,
}
