"""Every key of a run, with its default. Other config files start from here and change some.

Defaults that the paper leaves open follow its code base's published configuration; they are
marked (open).
"""

from ml_collections import ConfigDict

# The repair cue of the paper (reflection-guided resampling).
CUE = (
    "\nYour previous reasoning was incorrect. Identify the failing operation, correct it, and "
    "re-derive the necessary quantities. Keep this section concise. Do not restate the question.\n"
)


def source(name: str = "", **options) -> ConfigDict:
    """One source of examples: every key it has, some of them set.

    Args:
        name: of the source.
        options: keys to set; one that does not exist is refused.
    """
    section = ConfigDict()
    # synthetic, jsonl, parquet, arrayrecord, chartqa, geometry3k, virl39k, vision_r1_cold; or
    # "mixture" of the sources in `parts`.
    section.source = name
    section.path = ""  # file, folder or hub id; none for synthetic and mixture
    section.split = ""  # of a release: train, val, test
    section.subset = ""  # part of a release (chartqa: human, augmented), see its reader
    section.images = ""  # folder that image paths start from; empty: the release's own
    section.num_examples = 0  # to draw; or the first so many rows of a release, 0 for all
    section.seed = 0  # of what is drawn
    section.weight = 0.0  # share in a mixture; 0 in all of its parts: their numbers of examples
    section.tolerance = 0.0  # relative error allowed between numbers; chartqa's benchmark: 0.05
    section.min_pixels = 0  # of this source's images; 0: data.min_pixels
    section.max_pixels = 0  # likewise
    section.columns = columns = ConfigDict()  # of the parquet source; empty for none
    for column in ("id", "question", "answer", "images", "choices", "rationale", "response"):
        columns[column] = ""
    section.parts = ()  # of a mixture: sources
    section.lock()
    section.update(options)
    return section


def get_config() -> ConfigDict:
    """A complete configuration: Qwen2.5-VL sizes, CARE objective, no data source."""
    config = ConfigDict()
    # In this order, each from the parameters the one before left; "evaluate" may stand twice.
    config.stages = ("sft", "rl", "evaluate")  # also "export"
    config.seed = 0
    config.log_every = 1  # steps between logged lines
    config.checkpoint_every = 50  # steps; the last step of a stage is always saved
    config.keep_checkpoints = 2
    # Compiled programs are kept in workdir/compilation_cache: started again, a run compiles none.
    config.compilation_cache = True
    # (first, last) step of RL that is traced to workdir/profile by jax.profiler; empty: none.
    config.profile_steps = ()

    config.model = model = ConfigDict()
    model.path = ""  # folder or hub id of a Hugging Face release; empty: random weights
    model.backbone = ConfigDict()  # config.json of a backbone to start from random; with path empty
    model.tokenizer = ""  # folder of a tokenizer; empty: that of model.path, or the built-in one
    model.compute_dtype = "bfloat16"  # of activations and of the weights that decode
    # Attention over whole rows: "auto", a kernel where the device has one (TPU, GPU), after it was
    # compared with the compiler's own products; "xla", those alone; "kernel", without a comparison.
    model.attention = "auto"
    model.logprob_chunk = 1024  # tokens on a device whose logits are held at a time
    model.freeze_vision = False  # (open) the vision tower is trained
    # What the memory allows.
    model.remat = "layer"  # the backward pass recomputes "none", all but "dots", or each "layer"
    model.param_dtype = "float32"  # of the master weights; "bfloat16" rounds stochastically
    model.moments_dtype = "float32"  # of the optimizer's state; likewise
    model.lora_rank = 0  # above 0, adapters on the decoder's linear layers are all that is trained
    model.lora_alpha = 32.0  # their product is scaled by alpha / rank
    model.offload = ()  # to host memory: "reference", "optimizer"

    # Mesh sizes; -1 takes what the others leave.
    config.mesh = mesh = ConfigDict()
    mesh.data = 1
    mesh.fsdp = -1
    mesh.tensor = 1
    mesh.sequence = 1
    # Logical axis of a batch, parameter, activation or cache -> the mesh axes that shard it.
    # Training is FSDP over all of them: each device has rows of its own and a shard of every
    # parameter, all-gathered where it is used. Where one row does not fit a device, map "batch" to
    # ("data", "fsdp"), "embed" to ("fsdp", "sequence"), "vocab", "heads", "kv_heads" and "mlp" to
    # "tensor", "tokens" to "sequence" and "attended_heads" to ("tensor", "sequence").
    config.sharding_rules = (
        ("batch", ("data", "fsdp", "tensor", "sequence")),
        ("embed", ("fsdp", "tensor", "sequence")),
    )
    # Decoding: heads, MLP and vocabulary are sharded over tensor and sequence, the batch over data
    # and fsdp.
    config.decode_sharding_rules = (
        ("batch", ("data", "fsdp")),
        ("vocab", ("tensor", "sequence")),
        ("heads", ("tensor", "sequence")),
        ("kv_heads", ("tensor", "sequence")),
        ("mlp", ("tensor", "sequence")),
        ("attended_heads", ("tensor", "sequence")),
    )

    config.data = data = ConfigDict()
    data.train = source()
    data.sft = source()
    data.test = source()
    data.num_workers = 8  # threads that decode images and make prompts, in each process
    data.teacher_error = 0.0  # synthetic cold start: share of wrong sums and differences
    data.cue_share = 0.0  # synthetic cold start: share of rationales that carry the repair cue
    data.min_pixels = 262144  # (open) images are resized into this range
    data.max_pixels = 1003520  # (open) of the mixture; 4194304 for geometry alone
    # (prompt tokens, image patches) a batch is padded to; the smallest that holds it is taken.
    # Longer prompts are dropped and counted.
    data.buckets = ((512, 2048), (1024, 4096), (2048, 6144))
    data.system_prompt = "You are a helpful assistant."
    # Appended to the question, as the policy is told the format; {tag} stands for data.think_tag.
    data.instruction = (
        "First think about the reasoning process inside <{tag}> </{tag}> tags, then give the "
        "final answer inside <answer> </answer> tags."
    )
    data.think_tag = "think"  # "reasoning" for Qwen3-VL

    # What `python -m care_jax.data.prepare` writes.
    data.prepare = prepare = ConfigDict()
    prepare.sources = ()  # of what two of them share, the first keeps it
    prepare.benchmarks = ()  # sources whose questions must not be trained on
    prepare.near_bits = 20  # of 144 that may differ between hashes of the same picture
    prepare.shard_megabytes = 256

    config.sft = sft = ConfigDict()
    sft.num_steps = 1000
    sft.batch_size = 128  # examples of a step
    sft.microbatch_size = 0  # rows of one forward and backward; 0: one for each device
    sft.learning_rate = 1e-5
    sft.warmup_steps = 50
    sft.schedule = "cosine"  # "constant" or "cosine" (to 0)
    sft.weight_decay = 0.01
    sft.max_grad_norm = 1.0
    sft.answer_weight = 1.0  # weight of answer tokens against rationale tokens
    # A row holds prompts with their responses, as many as fit; what exceeds it is left out.
    sft.row_tokens = 4096
    sft.row_patches = 8192

    config.rl = rl = ConfigDict()
    rl.objective = "care"  # "care", "grpo", "dapo", "gspo", "dr_grpo", "rloo"
    rl.num_steps = 200  # rollout batches
    rl.num_rollouts = 8  # G
    rl.prompts_per_step = 512  # (open) prompts of a rollout batch
    rl.prompts_per_update = 128  # (open) prompts of one optimizer update
    rl.microbatch_size = 0  # rows of one forward and backward; 0: one for each device
    # A row holds prompts with the responses to them, as many as fit, each as long as it is; a
    # prompt whose responses fill more than a row stands in several.
    rl.row_tokens = 8192
    rl.row_patches = 8192
    rl.decode_prompts = 64  # prompts decoded at a time; one that is done gives way to the next
    rl.decode_rows = (
        4  # of them in flight at a time: of its rollouts, a row takes one after another
    )
    rl.max_response_tokens = 2048  # (open) T, forced tokens of a reflected row included
    rl.temperature = 1.0  # (open)
    rl.top_p = 1.0  # (open)
    rl.learning_rate = 1e-6  # (open)
    rl.warmup_steps = 0
    rl.schedule = "constant"  # (open) "constant" or "cosine" (to 0)
    rl.weight_decay = 0.01  # (open)
    rl.max_grad_norm = 1.0  # (open)
    rl.format_weight = 0.1  # λ of the reward (eq:overall)
    # π_old: "sampler", as it sampled; "trainer", computed anew by the trainer's forward, which
    # costs a forward and hides differences between the two programs' numerics.
    rl.old_logp = "sampler"

    # Each objective has a section, with its own clip range and KL. That of rl.objective is read;
    # a change of another is refused.
    config.care = care = ConfigDict()
    care.clip_low = 0.20  # how far the ratio to π_old may fall below 1
    care.clip_high = 0.28  # and rise above it
    care.beta = 0.02  # β, weight of the KL to the reference policy; 0 keeps no reference
    care.anchor_rule = "shortest"  # of the correct rows; "random": any of them
    care.K = 4  # most negatives of a subgroup
    care.M = 6  # nearest failures among which the spread ones are taken
    care.rule = "nearest_diverse"  # nearest, nearest_diverse, mixed, farthest, random
    care.s = 0.5  # weight of the negatives' advantages
    care.s_refl = 0.25  # of a reflected failure's: s/2
    care.delta = 0.1  # δ of the pseudo-rewards
    care.eps = 1e-6  # ε added to σ
    care.equalize = True  # A <- sqrt(K / K_S) A
    care.robust = False  # trimmed mean and median absolute deviation for μ, σ
    care.rescue = True  # all-failed groups get a pseudo-anchor
    care.rescue_scale = 1.0  # multiplies A of a rescued group
    care.region_weights = True  # False: weight 1 on every sampled token
    care.gamma_pos = 0.005  # weight of the rationale of a correct row; the answer's is 1
    care.gamma_neg = 0.0  # of the other rows
    care.eps_w = 1e-6  # ε_w, added to the sum of a row's weights
    care.reflect = True  # reflection-guided resampling (RGR)
    # "cue"; its controls: "no_cue", "shuffled" (the cue's words in another order), "resample" (a
    # fresh rollout, without cue and failed rationale).
    care.reflect_mode = "cue"
    care.reflect_credit = "as_sampled"  # "as_sampled" or "prompt_only"
    care.max_context = 1024  # most tokens of tag and failed rationale a reflected row keeps: T/2
    care.cue = CUE  # put right behind the rationale

    config.grpo = grpo = ConfigDict()
    grpo.clip_low = 0.20
    grpo.clip_high = 0.20
    grpo.beta = 0.02
    grpo.ddof = 0  # 0: population standard deviation; 1: sample, as EasyR1, verl and TRL
    grpo.eps = 1e-6  # ε added to σ

    config.dapo = dapo = ConfigDict()
    dapo.clip_low = 0.20
    dapo.clip_high = 0.28
    dapo.beta = 0.0
    dapo.ddof = 0  # as grpo.ddof
    dapo.eps = 1e-6
    # Dynamic sampling: further rollout batches are drawn until rl.prompts_per_step groups have both
    # right and wrong rollouts, but at most so many in all; 1 draws none. Missing groups weigh 0.
    dapo.max_tries = 10
    # Soft overlong penalty: the last share of rl.max_response_tokens, L_cache, over which it grows
    # from 0 to -1; 0 for none. As published: 4096 of 20480 tokens.
    dapo.overlong_share = 0.2

    config.gspo = gspo = ConfigDict()
    # Of the whole response's ratio. In a range so narrow the numerics of sampler and trainer
    # differ visibly in bfloat16, see clip_rate; rl.old_logp = "trainer" hides that.
    gspo.clip_low = 3e-4
    gspo.clip_high = 4e-4
    gspo.beta = 0.0
    gspo.ddof = 0  # as grpo.ddof
    gspo.eps = 1e-6

    config.dr_grpo = dr_grpo = ConfigDict()
    dr_grpo.clip_low = 0.20
    dr_grpo.clip_high = 0.20
    dr_grpo.beta = 0.0

    config.rloo = rloo = ConfigDict()
    # The paper updates once per rollout batch, where no ratio leaves 1.
    rloo.clip_low = 0.20
    rloo.clip_high = 0.20
    rloo.beta = 0.0  # the paper's KL is a part of a preference's reward; a verifier needs none

    config.evaluate = evaluate = ConfigDict()
    evaluate.batch_size = 64
    evaluate.max_response_tokens = 2048
    # (name, path of its downloaded release), beside or in place of data.test; names are mathvista,
    # mathverse, mathvision, mathvision_testmini, mmmu, mmmu_pro and mmmu_pro_vision.
    evaluate.benchmarks = ()
    # An OpenAI-compatible endpoint, up to /chat/completions, that is asked about the free answers
    # the rules call wrong; its key in the environment as JUDGE_API_KEY. Empty: nobody is asked.
    evaluate.judge_url = ""
    evaluate.judge_model = ""
    evaluate.judge_timeout = 60.0  # seconds for one request
    evaluate.judge_retries = 3  # further requests after one that failed
    evaluate.judge_prices = (0.0, 0.0)  # of a million prompt and completion tokens, to count cost

    # workdir/report.html: curves, and prompts with their images, responses and advantages.
    config.report = report = ConfigDict()
    report.groups_per_step = 4  # prompts shown of every logged step, each outcome in turn; 0: none
    report.max_megabytes = 16.0  # of the file; where it would grow larger, old steps are thinned
    report.image_side = 448  # pixels of the longer side of an image in it

    config.metrics = metrics = ConfigDict()
    # Beside metrics.jsonl and TensorBoard, under the same names (wandb extra). Empty: not written.
    metrics.wandb_project = ""

    config.verifier = verifier = ConfigDict()
    verifier.num_workers = 2  # processes for answers that need symbolic comparison
    verifier.timeout = 5.0  # seconds until a worker is killed and its answer scores 0
    # "module:function" that judges instead: called with question, response and Example, it returns
    # (acc, fmt), each in [0, 1]. Empty: the built-in comparison with the gold answer.
    verifier.reward = ""
    return config
