"""Programs of a rollout that follow a script.

Prompt i asks for the answer i. Its rollouts are right, wrong and wrong, unless a test says
otherwise; the scripted selector takes the last failure for the hard negative.
"""

import functools
import hashlib
from collections import defaultdict

import jax
import numpy as np

from care_jax.batch import Rollouts, Subgroup
from care_jax.rl.rollout_programs import RolloutPrograms

T = 48
LENGTHS = (7, 0, 5, 2, 9, 3)  # of the questions, none of them in order
CUE = " Wait, no."


def said(rationale, answer):
    return f"<think>{rationale}</think><answer>{answer}</answer>"


def coin(question, responses, example):
    """Judges by the text alone, so that a group of random responses has both outcomes."""
    return [{"acc": hashlib.md5(text.encode()).digest()[0] % 2} for text in responses]


class Script:
    """Stands in for the compiled programs and keeps what they were asked.

    Args:
        policy: whose tokens are written.
        examples: the prompts, told apart by their lengths.
        accs: per prompt, which of its rollouts are right.
        repaired: prompts whose reflected row is right.
    """

    def __init__(self, policy, examples, accs, repaired):
        self.policy, self.accs, self.repaired = policy, accs, repaired
        self.encode = functools.partial(policy.tokenizer.encode, add_special_tokens=False)
        self.index_of = {  # the first, if an example is given twice
            len(policy.prompts.tokenize(example).tokens): i
            for i, example in reversed([*enumerate(examples)])
        }
        self.calls, self.keys, self.forced = [], defaultdict(list), {}
        self.failure = lambda i, g: said(f"row {g} of {i}", 99)
        self.repair = lambda answer: f" So</think><answer>{answer}</answer>"
        self.at_end = lambda: None  # of the first decode

    def programs(self):
        return RolloutPrograms(self.decode, None, self.reflect, self.select)

    def decode(self, params, rng, requests):
        """Two prompts at a time, the last first."""
        self.note("decode", rng, [request.index for request in requests])
        assert not any(len(request.context) for request in requests)
        numbers = list(range(len(requests)))[::-1]
        for pair in zip(numbers[::2], numbers[1::2], strict=True):
            self.calls.append("decode")
            rows = []
            for number in pair:
                i = self.index_of[len(requests[number].prompt.tokens)]
                texts = [
                    said(f"row {g} of {i}", i) if is_right else self.failure(i, g)
                    for g, is_right in enumerate(self.accs[i])
                ]
                rows.append([self.response(text) for text in texts])
            yield list(pair), self.rollouts(rows)
        self.at_end()

    def reflect(self, params, rng, requests):
        self.note("reflect", rng, [request.index for request in requests])
        for number, request in list(enumerate(requests))[::-1]:
            self.calls.append("reflect")
            i = self.index_of[len(request.prompt.tokens)]
            self.forced[i] = self.policy.tokenizer.decode(request.context)
            answer = i if i in self.repaired else 98
            sampled = self.response(self.repair(answer))
            row = np.append(request.context, sampled)
            yield [number], self.rollouts([[row]], [[len(request.context)]])

    def select(self, rollouts, scores, rng, places):
        self.note("select", rng, places)
        self.calls.append("select")
        is_success, is_failure = scores.acc == 1, scores.acc == 0
        return Subgroup(
            anchor=is_success.argmax(1),
            is_negative=is_failure,
            hard_negative=is_success.shape[1] - 1 - is_failure[:, ::-1].argmax(1),
            is_rescue=~is_success.any(1),
            has_update=is_failure.any(1),
        )

    def note(self, program, rng, places):
        key = tuple(jax.random.key_data(rng).tolist())
        self.keys[program] += [(key, place) for place in np.asarray(places).tolist()]

    def response(self, text):
        return self.policy.prompts.response_tokens(text)

    def rollouts(self, rows, num_forced=None):
        """Rows of tokens as records; a token's log-probability is its negative id."""
        shape = (len(rows), len(rows[0]), T)
        tokens = np.full(shape, self.policy.config.pad_token_id, np.int32)
        lengths = np.array([[len(row) for row in group] for group in rows])
        is_valid = np.arange(T) < lengths[..., None]
        tokens[is_valid] = np.concatenate([row for group in rows for row in group])
        num_forced = np.zeros(shape[:2], int) if num_forced is None else np.array(num_forced)
        is_forced = np.arange(T) < num_forced[..., None]
        return Rollouts(
            tokens=tokens,
            is_valid=is_valid,
            is_forced=is_forced,
            logp=-tokens * (is_valid & ~is_forced).astype(np.float32),
            embedding=np.zeros((*shape[:2], 2), np.float32),
            is_complete=lengths > 0,
        )
