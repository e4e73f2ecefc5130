"""Every configuration key, with its default. The other config files start from this one.

Defaults marked (open) are not given in the paper; they follow the published configuration of its
code base.
"""

from ml_collections import ConfigDict

# The repair cue of the paper (reflection-guided resampling).
CUE = (
    "\nYour previous reasoning was incorrect. Identify the failing operation, correct it, and "
    "re-derive the necessary quantities. Keep this section concise. Do not restate the question.\n"
)


def source(name: str = "", **options) -> ConfigDict:
    """The configuration of one data source: every key with its default, then `options`.

    An unknown key among the options is an error.
    """
    section = ConfigDict()
    # Drawn: synthetic (charts and diagrams), readings (diagrams; rationales state what is read),
    # word_problems (text alone). Read: jsonl, parquet, arrayrecord, chartqa, geometry3k, virl39k,
    # vision_r1_cold. Or "mixture", the sources in `parts`.
    section.source = name
    section.path = ""  # file, folder or hub id; empty for drawn sources and mixture
    section.split = ""  # split of a release: train, val, test
    section.subset = ""  # part of a release (chartqa: human, augmented), see its reader
    section.images = ""  # folder that image paths are relative to; empty: the release's folder
    # False: rows whose image paths lead out of that folder are left out, so that no data can show
    # the model a file of yours.
    section.images_outside = False
    section.num_examples = 0  # of a drawn source; else: use only the first rows, 0 for all of them
    section.seed = 0  # of a drawn source
    section.weight = 0.0  # share in a mixture; 0 in all of its parts: proportional to their sizes
    section.tolerance = 0.0  # relative error allowed between numbers; the ChartQA benchmark: 0.05
    section.min_pixels = 0  # per image, height x width; 0: data.min_pixels
    section.max_pixels = 0  # likewise; 0: data.max_pixels
    # Column names of the parquet source; empty: it has no such column.
    columns = ("id", "question", "answer", "images", "choices", "rationale", "response")
    section.columns = ConfigDict(dict.fromkeys(columns, ""))
    section.parts = ()  # the sources of a mixture
    section.lock()
    section.update(options)
    return section


def get_config() -> ConfigDict:
    """A complete configuration: Qwen2.5-VL sizes, CARE objective, no data source."""
    config = ConfigDict()
    # Run in this order, each from the parameters of the one before. "evaluate" may appear twice.
    config.stages = ("sft", "rl", "evaluate")  # also "export"
    config.seed = 0
    config.log_every = 1  # steps between console lines, and in SFT between logged metrics
    config.checkpoint_every = 50  # steps; the last step of a stage is always saved
    config.keep_checkpoints = 2  # newest checkpoints kept, per stage
    config.keep_best = 0  # checkpoints kept besides, per stage: those of the highest best_metric
    # Metric of the evaluations inside a stage: acc, fmt, pass@2 and the like of data.test;
    # <benchmark>/acc, <benchmark>/pass@2, or mean/acc of the benchmarks.
    config.best_metric = "acc"
    config.xla_preset = "auto"  # XLA flags, see `care_jax.devices.xla_flags`, or "none"
    # A state is checked before it is saved or evaluated. If it is broken, the run ends and the last
    # good checkpoint stays. Broken: not finite, or worse than the last state by these factors.
    config.state_check = state_check = ConfigDict()
    # Maximum loss on the last batch, as a multiple of the larger of log(vocabulary) and the last
    # loss; inf: any.
    state_check.max_loss_factor = 2.0
    state_check.max_norm_factor = 10.0  # maximum growth of the parameters' norm; inf: any
    config.compilation_cache = True  # keep compiled programs in workdir/compilation_cache
    config.profile_steps = ()  # (first, last) RL step that is traced to workdir/profile

    config.model = model = ConfigDict()
    model.path = ""  # folder or hub id of a Hugging Face release; empty: random weights
    model.backbone = ConfigDict()  # config.json fields for random weights; needs an empty path
    model.tokenizer = ""  # folder of a tokenizer; empty: that of model.path, or the built-in one
    model.compute_dtype = "bfloat16"  # dtype of activations and of the weights used in decoding
    # Attention of training and prefill: "xla"; "kernel", that of the device (TPU, GPU); "auto", the
    # kernel if there is one and it agrees with XLA when a stage starts.
    model.attention = "auto"
    # Tokens per device whose logits are in memory at a time. 0: 4096 on GPUs with FSDP, else 1024.
    model.logprob_chunk = 0
    model.freeze_vision = False  # (open) False: the vision tower is trained
    model.freeze_decoder = False  # True: only the vision tower and its merger are trained
    # The next keys trade speed or precision for memory.
    # What the backward pass rematerialises: "none"; "dots", everything except the outputs of weight
    # matmuls and attention; "layer", each layer from its input.
    model.remat = "layer"
    model.param_dtype = "float32"  # dtype of the master weights; "bfloat16" rounds stochastically
    model.moments_dtype = "float32"  # dtype of the optimizer state; likewise
    model.lora_rank = 0  # above 0: train only LoRA adapters on the decoder's linear layers
    model.lora_alpha = 32.0  # the adapters are scaled by alpha / rank
    model.offload = ()  # what is kept in host memory: "reference", "optimizer"

    # Devices along each mesh axis; one may be -1 and takes the remaining devices.
    config.mesh = mesh = ConfigDict()
    mesh.data = 0  # 0: the number of TPU slices or GPU nodes, between which the network is slow
    mesh.fsdp = -1
    mesh.tensor = 1
    mesh.sequence = 1
    # Logical axis of a batch, parameter, activation or cache -> the mesh axes that shard it.
    # Training is FSDP: the batch is sharded over all mesh axes, parameters over fsdp, tensor and
    # sequence, and all-gathered for use. If one row does not fit on a device, map
    # "batch" to ("data", "fsdp"), "embed" to ("fsdp", "sequence"), "vocab", "heads", "kv_heads" and
    # "mlp" to "tensor", "tokens" to "sequence" and "attended_heads" to ("tensor", "sequence").
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
    data.num_workers = 8  # threads per process that decode images and tokenise prompts
    # Of the cold start on a drawn source, as shares of its responses:
    data.teacher_error = 0.0  # a wrong result, among the kinds that the teacher cannot compute
    data.misread_share = 0.0  # source readings: a wrong reading, among the kinds that it misreads
    data.cue_share = 0.0  # a rationale with the repair cue in it
    data.min_pixels = 262144  # (open) minimum height x width that images are resized to
    data.max_pixels = 1003520  # (open) maximum, for the mixture; 4194304 for geometry alone
    # (prompt tokens, image patches) per prompt. A batch is padded to the smallest bucket that holds
    # all of its prompts. Prompts that fit no bucket are left out and counted. ((512, 0),) is for
    # text alone.
    data.buckets = ((512, 2048), (1024, 4096), (2048, 6144))
    data.system_prompt = "You are a helpful assistant."
    # Appended to every question to state the format; {tag} is replaced by data.think_tag.
    data.instruction = (
        "First think about the reasoning process inside <{tag}> </{tag}> tags, then give the "
        "final answer inside <answer> </answer> tags."
    )
    data.think_tag = "think"  # tag of the rationale; "reasoning" for Qwen3-VL

    # What `python -m care_jax.commands.prepare` writes.
    data.prepare = prepare = ConfigDict()
    prepare.sources = ()  # in order; of two equal examples the first is kept
    prepare.benchmarks = ()  # sources whose questions must not be trained on
    prepare.near_bits = 20  # images match if at most so many of 144 perceptual-hash bits differ
    prepare.shard_megabytes = 256  # MiB after which an output shard is closed

    config.sft = sft = ConfigDict()
    sft.num_steps = 1000
    sft.eval_every = 0  # steps between evaluations inside the stage, and after its last; 0: none
    sft.batch_size = 128  # examples per step
    sft.microbatch_size = 0  # packed rows per pass on all devices; 0: one per shard of the batch
    sft.learning_rate = 1e-5  # peak
    sft.warmup_steps = 50
    sft.schedule = "cosine"  # "constant" or "cosine" (to 0)
    sft.weight_decay = 0.01
    sft.max_grad_norm = 1.0  # the global gradient norm is clipped to this
    sft.max_skipped = 0  # updates in a row that are skipped if not finite; one more ends the run
    sft.answer_weight = 1.0  # loss weight of answer tokens; all other response tokens weigh 1
    sft.row_tokens = 4096  # of a row, into which examples are packed; longer examples are left out
    sft.row_patches = 8192  # image patches of a row

    config.rl = rl = ConfigDict()
    rl.objective = "care"  # "care", "grpo", "dapo", "gspo", "dr_grpo", "rloo"
    rl.num_steps = 200  # rollout batches
    rl.eval_every = 0  # steps between evaluations inside the stage, and after its last; 0: none
    rl.num_rollouts = 8  # G, rollouts per prompt
    rl.prompts_per_step = 512  # (open) prompts per rollout batch
    rl.prompts_per_update = 128  # (open) prompts per optimizer update
    rl.microbatch_size = 0  # as sft.microbatch_size
    # Maximum tokens of a row, into which prompts are packed with their responses. A prompt whose
    # responses do not fit in one row is repeated in several.
    rl.row_tokens = 8192
    rl.row_patches = 8192  # image patches of a row
    rl.decode_prompts = 64  # prompts decoded at a time; the next one replaces a finished one
    rl.decode_rows = 4  # rollouts decoded at a time per prompt; the next replaces a finished one
    rl.max_response_tokens = 2048  # (open) T, including the forced tokens of a reflected row
    rl.temperature = 1.0  # (open)
    rl.top_p = 1.0  # (open)
    rl.learning_rate = 1e-6  # (open) peak
    rl.warmup_steps = 0  # optimizer updates
    rl.schedule = "constant"  # (open) "constant" or "cosine" (to 0)
    rl.weight_decay = 0.01  # (open)
    rl.max_grad_norm = 1.0  # (open)
    rl.max_skipped = 0  # updates in a row, see sft.max_skipped
    rl.format_weight = 0.1  # λ of the reward (eq:overall)
    # Log-probabilities under π_old: "sampler", as recorded during sampling; "trainer", recomputed
    # by the trainer, which costs a forward pass and hides differences of the two programs.
    rl.old_logp = "sampler"

    # One section per objective, each with its clip range and KL weight. Only the section of
    # rl.objective is read; a key of another section on the command line is an error.
    config.care = care = ConfigDict()
    # The importance ratio to π_old is clipped to [1 - clip_low, 1 + clip_high].
    care.clip_low = 0.20
    care.clip_high = 0.28
    care.beta = 0.02  # β, weight of the KL to the reference policy; 0: no reference is kept
    care.anchor_rule = "shortest"  # among the correct rollouts; "random": any of them
    care.K = 4  # maximum number of hard negatives per prompt
    care.M = 6  # nearest_diverse: it chooses among the M failures nearest to the anchor
    care.rule = "nearest_diverse"  # nearest, nearest_diverse, mixed, farthest, random
    care.s = 0.5  # scale of the negatives' advantages
    care.s_refl = 0.25  # scale of a reflected failure's advantage; s/2
    care.delta = 0.1  # δ of the pseudo-rewards in a rescued group
    care.eps = 1e-6  # ε added to σ
    care.equalize = True  # A <- sqrt(K / K_S) A if a subgroup has only K_S < K negatives
    care.robust = False  # True: μ, σ are the trimmed mean and the median absolute deviation
    care.rescue = True  # all-failed groups get a pseudo-anchor
    care.rescue_scale = 1.0  # advantages of a rescued group are multiplied by this
    care.region_weights = True  # False: weight 1 on every sampled token
    care.gamma_pos = 0.005  # weight of a correct rollout's rationale tokens; its answer weighs 1
    # Above 0, instead of gamma_pos: the rationale's share of a correct rollout's credit. gamma_pos
    # 0.005 gives 400 rationale tokens a share of 0.17 beside 10 answer tokens.
    care.gamma_share = 0.0
    care.gamma_neg = 0.0  # weight of rationale tokens in all other rollouts
    care.eps_w = 1e-6  # ε_w, added to the sum of a rollout's token weights
    care.reflect = True  # reflection-guided resampling (RGR)
    # "cue", or one of its controls: "no_cue"; "shuffled", the words of the cue in random order;
    # "resample", a fresh rollout without cue and failed rationale.
    care.reflect_mode = "cue"
    # A reflected row is trained with its forced context ("as_sampled") or without ("prompt_only").
    care.reflect_credit = "as_sampled"
    care.max_context = 1024  # maximum tokens of think tag and failed rationale in the context; T/2
    care.cue = CUE  # appended directly to the failed rationale

    config.grpo = grpo = ConfigDict()
    grpo.clip_low = 0.20
    grpo.clip_high = 0.20
    grpo.beta = 0.02
    grpo.ddof = 0  # 0: population standard deviation; 1: sample, as in EasyR1, verl and TRL
    grpo.eps = 1e-6  # ε added to σ

    config.dapo = dapo = ConfigDict()
    dapo.clip_low = 0.20
    dapo.clip_high = 0.28
    dapo.beta = 0.0
    dapo.ddof = 0  # as grpo.ddof
    dapo.eps = 1e-6
    # Dynamic sampling: maximum number of rollout batches per step. They are drawn until
    # rl.prompts_per_step groups have both correct and wrong rollouts. If the maximum is reached
    # first, the other groups get weight 0.
    dapo.max_tries = 10
    # L_cache as a share of rl.max_response_tokens (published: 4096 of 20480), over which the soft
    # overlong penalty grows from 0 to -1; 0: no penalty.
    dapo.overlong_share = 0.2

    config.gspo = gspo = ConfigDict()
    # Clip range of the sequence-level ratio. It is so narrow that in bfloat16 numerical differences
    # between sampler and trainer show up in clip_rate; rl.old_logp = "trainer" hides them.
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
    # The paper does one update per rollout batch, so that every ratio is 1 and none is clipped.
    rloo.clip_low = 0.20
    rloo.clip_high = 0.20
    rloo.beta = 0.0  # the paper's KL is part of a preference reward; a verifier needs none

    config.evaluate = evaluate = ConfigDict()
    evaluate.batch_size = 64  # questions decoded at a time
    evaluate.max_response_tokens = 2048
    evaluate.temperature = 0.0  # 0: greedy. The paper evaluates with rl.temperature and rl.top_p
    evaluate.top_p = 1.0  # as rl.top_p; needs a temperature above 0
    evaluate.num_samples = 1  # per question; above 1, accuracy is their mean, pass@k estimated
    evaluate.decode_rows = 4  # samples decoded at a time per question, at most num_samples
    evaluate.at_start = True  # with eval_every: evaluate before the stage's first step too
    # (name, path of the downloaded release) pairs, evaluated in addition to data.test, or alone if
    # data.test is not set. Names: mathvista, mathverse, mathvision, mathvision_testmini, mmmu,
    # mmmu_pro, mmmu_pro_vision.
    evaluate.benchmarks = ()
    # URL of an OpenAI-compatible endpoint, without /chat/completions, that judges the free-form
    # benchmark answers that the rules call wrong; JUDGE_API_KEY holds its key. Empty: no judge.
    evaluate.judge_url = ""
    evaluate.judge_model = ""
    evaluate.judge_timeout = 60.0  # seconds per request
    evaluate.judge_retries = 3  # retries of a failed request
    evaluate.judge_prices = (0.0, 0.0)  # per million (prompt, completion) tokens, to count cost

    # Which checkpoint of the last training stage is exported: "last", "best" by best_metric, or the
    # number of a saved step. It is also the one that a run without training evaluates.
    config.export = export = ConfigDict()
    export.step = "last"

    # workdir/report.html: curves, and prompts with their images, responses and advantages.
    config.report = report = ConfigDict()
    report.groups_per_step = 4  # prompts shown per logged step, from each outcome in turn; 0: none
    report.max_megabytes = 16.0  # MiB of the file; old steps are thinned out to stay below it
    report.image_side = 448  # maximum pixels of an image's longer side
    # MiB of workdir/rollouts.jsonl and rollouts.1.jsonl, every response of the last steps with its
    # reward, components and advantage; per process. 0: not written.
    report.rollouts_megabytes = 256.0

    config.metrics = metrics = ConfigDict()
    metrics.wandb_project = ""  # also gets the metrics (needs care_jax[wandb]); empty: not used

    config.verifier = verifier = ConfigDict()
    verifier.num_workers = 2  # worker processes for computer algebra or the reward function
    verifier.timeout = 5.0  # seconds per answer (reward function: per group), which then scores 0
    # "module:function" that replaces the built-in verifier: called with (question, responses,
    # Example), it returns a mapping of components in [0, 1] for each response of the group. Empty:
    # compare with the gold answer.
    verifier.reward = ""
    # The next keys are those of a reward function. (component, weight) pairs: their weighted sum
    # takes the place of acc in the reward, beside rl.format_weight.
    verifier.weights = (("acc", 1.0),)
    verifier.success = 0.5  # a response whose component acc is at least this is a success
    verifier.concurrency = 16  # groups that each worker awaits at once, for an async function
    return config
