"""Decoding as plainly as it can be: every token from a forward over the whole row, no cache at all.

The reference of `decoding.sampler` and `decoding.queue`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from care_jax.decoding.sampling import sample_token
from models import backbone
from models.positions import feature_indices, pack_images, prompt_positions


@functools.partial(jax.jit, static_argnames=("config", "temperature", "top_p"))
def _sample(params, rows, images, positions, feature_index, place, key, index, *, config, **choice):
    """The token at `place` of every row, its logp at temperature 1 and as drawn, and the hidden
    state before it."""
    x, features = backbone.embed_with_images(
        params, rows, images, feature_index, config, dtype=jnp.float32
    )
    mask = backbone.text_mask(jnp.full(rows.shape, rows.shape[1] - 1, jnp.int32), config)
    hidden, _ = backbone.forward(
        params, x, positions, mask, config, features=features, feature_index=feature_index
    )
    hidden = hidden[:, place - 1]
    logits = backbone.policy_logits(params, hidden, config)
    u = jax.vmap(
        lambda rollout: jax.random.uniform(
            jax.random.fold_in(jax.random.fold_in(key, rollout), index)
        )
    )(jnp.arange(len(rows)))
    token, *_ = sample_token(logits, u, **choice)
    hot = jax.nn.softmax(logits / choice["temperature"])
    upto = jnp.cumsum(jnp.sort(hot, descending=True), 1)
    least = jnp.sort(hot, descending=True)[jnp.arange(len(hot)), (upto < choice["top_p"]).sum(1)]
    drawn = jnp.log(jnp.where(hot >= least[:, None], hot, 0))
    both = jax.nn.log_softmax(logits), jax.nn.log_softmax(drawn)
    logp = jnp.stack([jnp.take_along_axis(x, token[:, None], 1)[:, 0] for x in both], 1)
    return token, logp, hidden


def plain_decode(
    params, policy, prompt, key, *, room, num_rollouts, max_tokens, temperature, top_p, context=()
):
    """The rollouts of one prompt.

    Args:
        params: in the training layout.
        policy: of the config, and the automaton of the closing think tag.
        prompt: the prompt.
        key: of the prompt.
        room: tokens and patches of the longest prompt; prompts of the same room share a program.
        num_rollouts, max_tokens, temperature, top_p: as of a run; the context is in max_tokens.
        context: forced tokens in front of what is sampled.

    Returns:
        a tuple (tokens, logp [T, 2] at temperature 1 and as drawn, rationale sum) per rollout,
        forced tokens left out.
    """
    config, closing_tag = policy.config, np.asarray(policy.closing_tag)
    end = len(prompt.tokens)
    start, length = end + len(context), room[0] + max_tokens
    positions, following = prompt_positions(prompt.tokens, prompt.grids, config)
    behind = np.repeat(following + np.arange(length - end)[:, None], 3, 1)
    positions = np.tile(np.concatenate([positions, behind]), (num_rollouts, 1, 1))
    feature_index = np.full((num_rollouts, length), -1, np.int32)
    feature_index[:, :end] = feature_indices(prompt.tokens, prompt.grids, config)
    every = [prompt] * num_rollouts
    images = pack_images(
        [p.patches for p in every], [p.grids for p in every], config.vision, room[1]
    )
    choice = dict(config=config, temperature=temperature, top_p=top_p)

    rows = np.full((num_rollouts, length), config.pad_token_id, np.int32)
    rows[:, :end] = prompt.tokens
    rows[:, end:start] = context
    sampled, logps, states = [], [], []
    for place in range(start, end + max_tokens):
        token, logp, hidden = _sample(
            params,
            rows.copy(),
            images,
            positions,
            feature_index,
            place,
            key,
            place - start,
            **choice,
        )
        rows[:, place] = token
        sampled, logps, states = [*sampled, token], [*logps, logp], [*states, hidden]

    def cut(row):
        """One rollout, to its EOS; states[i] is what token i was sampled from."""
        tokens = [int(token[row]) for token in sampled]
        ends = [i for i, token in enumerate(tokens) if token in config.eos_token_ids]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        rationale, tag = np.zeros(config.text.hidden_size), 0
        for i, token in enumerate(tokens[:-1]):
            if tag < closing_tag.shape[0] - 1:
                rationale += states[i + 1][row]
            tag = closing_tag[tag, token]
        return tokens, np.stack([logp[row] for logp in logps[: len(tokens)]]), rationale

    return [cut(row) for row in range(num_rollouts)]
