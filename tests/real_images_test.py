"""Real figures of many sizes go through rollout, verification and update."""

import pytest
from small_run import metrics_of

from care_jax import main
from configs import real_images


@pytest.mark.exhaustive
@pytest.mark.usefixtures("one_device")
def test_real_figures_compile_once_per_bucket_and_shape_of_rows(tmp_path, shared, monkeypatch):
    """76 figures of many sizes go through rollout, verification and update."""
    path = str(shared / "data" / "mathvision_mini" / "testmini.jsonl")
    config = real_images.get_config()
    config.stages = ("rl",)
    config.data.train.path = path
    config.rl.num_steps, config.rl.num_rollouts = 2, 2
    config.rl.prompts_per_step = config.rl.prompts_per_update = 38
    config.rl.max_response_tokens = 20
    config.care.beta = 0.0
    programs = {}
    for name in ("compile_rollout", "compile_update"):
        compile_function = getattr(main.rl, name)

        def kept(*args, name=name, compile_function=compile_function):
            programs[name] = compile_function(*args)
            return programs[name]

        monkeypatch.setattr(main.rl, name, kept)
    main.run_stages(config, tmp_path)
    rl = metrics_of(tmp_path)
    assert len(rl) * config.rl.prompts_per_step == 76
    num_buckets = len(config.data.buckets)
    update, rollout = programs["compile_update"], programs["compile_rollout"]
    decoding = rollout.decode.__self__.programs
    counts, num_shapes, num_calls = (
        {name: getattr(owner, name)._cache_size() for name in names}
        for owner, names in (
            (update, ("credit",)),
            (update, ("update", "score")),
            (decoding, ("admit", "advance")),
        )
    )
    assert all(count <= num_buckets for count in counts.values()), counts
    assert rollout.select._cache_size() == 1
    # Two passes, in each of which prompts of one bucket sit beside those of another, and the slots
    # become half and a quarter.
    assert 2 <= num_calls["admit"] <= 2 * (num_buckets + 1)
    assert 2 <= num_calls["advance"] <= 2 * 3 * num_buckets
    # Rows of trees come in few lengths and numbers, whatever is in them.
    assert all(count <= 3 for count in num_shapes.values()), num_shapes
    assert all(0 < record["train_fill"] <= 1 for record in rl)
