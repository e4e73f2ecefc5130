"""Every configuration key, with its default. The other config files start from this one.

(open): the paper, arXiv 2512.19554, gives no value; the default is that of its released code.
Labels such as tab:train_config are the paper's. `care_jax/config/keys.py` checks the ranges.
"""

from ml_collections import ConfigDict

# The repair cue of the paper (sec:care-reflection).
CUE = (
    "\nYour previous reasoning was incorrect. Identify the failing operation, correct it, and "
    "re-derive the necessary quantities. Keep this section concise. Do not restate the question.\n"
)


def source(name: str = "", **options) -> ConfigDict:
    """A data source: the defaults below, updated with `options`. Unknown options are an error."""
    section = ConfigDict()
    # Drawn: synthetic (charts and diagrams), readings (diagrams whose rationales state what was
    # read), word_problems (text only). Files: jsonl, parquet, arrayrecord, chartqa, geometry3k,
    # virl39k, vision_r1_cold, gsm8k, math. "mixture": the sources in `parts`.
    section.source = name
    section.path = ""  # file, folder or hub id; empty for drawn sources and mixtures
    section.split = ""  # split of a release: train, val, test; of files also "all"
    section.subset = ""  # part of a release, see its reader; chartqa: human, augmented
    section.images = ""  # folder of relative image paths; empty: the release's folder
    # False: rows with an image path outside that folder are dropped, so that untrusted data cannot
    # read other files.
    section.images_outside = False
    section.num_examples = 0  # drawn: number of examples; files: only the first rows, 0 for all
    section.seed = 0  # of a drawn source
    section.weight = 0.0  # sampling weight in a mixture; 0 in all parts: proportional to their size
    section.tolerance = 0.0  # relative error allowed between numbers; the ChartQA benchmark: 0.05
    section.min_pixels = 0  # minimum height x width of an image; 0: data.min_pixels
    section.max_pixels = 0  # maximum; 0: data.max_pixels
    # Names of columns of parquet (empty: no such column; context and units are found by these
    # names) and of fields of jsonl (empty: of these names); "none": none, though there is one.
    columns = ("id", "question", "answer", "images", "choices", "rationale", "response")
    section.columns = ConfigDict(dict.fromkeys((*columns, "context", "units"), ""))
    section.parts = ()  # the sources of a mixture
    section.lock()
    section.update(options)
    return section


def get_config() -> ConfigDict:
    """The defaults of all keys: CARE, sized for Qwen2.5-VL; no model and no data source."""
    config = ConfigDict()
    # In order; each starts from the parameters of the previous one. "evaluate" may be repeated.
    config.stages = ("sft", "rl", "evaluate")  # also "export"
    config.seed = 0  # of initial weights, data order and sampling
    config.log_every = 1  # steps between console lines; in SFT also between logged metrics
    config.checkpoint_every = 50  # steps; the last step of a stage is always saved
    config.keep_checkpoints = 2  # newest checkpoints kept per stage
    config.keep_best = 0  # checkpoints kept in addition per stage, by the highest best_metric
    # Metric of the evaluations during a stage, higher is better: acc, fmt or pass@k of data.test;
    # <benchmark>/acc, <benchmark>/pass@k; mean/acc over the benchmarks.
    config.best_metric = "acc"
    config.xla_preset = "auto"  # XLA flags of `care_jax.devices.xla_flags`; "none": set no flags
    # A state is checked before it is saved or evaluated: it must be finite and not far worse than
    # the last one. If it fails, the run ends and the last good checkpoint stays.
    config.state_check = state_check = ConfigDict()
    # Maximum loss on the last batch, as a multiple of max(log(vocabulary size), last loss); inf:
    # unchecked.
    state_check.max_loss_factor = 2.0
    state_check.max_norm_factor = 10.0  # maximum growth of the parameter norm; inf: unchecked
    config.compilation_cache = True  # keep compiled programs in ~/.cache/care_jax, for all runs
    config.profile_steps = ()  # (first, last) RL step traced to workdir/profile; (): none

    config.model = model = ConfigDict()
    model.path = ""  # folder or hub id of a Hugging Face release; empty: random weights
    model.backbone = ConfigDict()  # config.json fields for random weights; needs an empty path
    model.tokenizer = ""  # tokenizer folder; empty: that of model.path, or the built-in one
    model.compute_dtype = "bfloat16"  # dtype of activations and of the weights used in decoding
    # Attention: "xla"; "kernel", the Pallas kernels for the device (TPU, GPU), unchecked; "auto",
    # a kernel if it agrees with XLA when a stage starts, and in decode steps is faster.
    model.attention = "auto"
    model.freeze_vision = False  # (open) True: the vision tower is not trained
    # The next keys trade speed or precision for memory.
    # What the backward pass rematerialises: "none"; "dots", everything except the outputs of weight
    # matmuls and attention; "layer", each layer from its input.
    model.remat = "layer"
    model.param_dtype = "float32"  # dtype of the master weights; "bfloat16" rounds stochastically
    model.moments_dtype = "float32"  # dtype of the optimizer state; likewise
    model.lora_rank = 0  # above 0: train only LoRA adapters on the decoder's linear layers
    model.lora_alpha = 32.0  # adapters are scaled by lora_alpha / lora_rank
    model.lora_experts = False  # adapters on the experts of a sparse decoder too
    # Kept in host memory: "reference", "optimizer", "rollouts" (the slots of rl.carry_over between
    # two steps).
    model.offload = ()

    # Devices along each mesh axis; -1 on one axis: the remaining devices.
    config.mesh = mesh = ConfigDict()
    # 0: the number of TPU slices or GPU nodes, which a slower network connects. With 1 parameters
    # are sharded over them too, and gathered through that network.
    mesh.data = 0
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
        ("expert", ("tensor", "sequence")),  # of sparse models
        ("expert_embed", "fsdp"),
    )
    # Decoding: tensor parallel over tensor and sequence, data parallel over data and fsdp.
    config.decode_sharding_rules = (
        ("batch", ("data", "fsdp")),
        ("vocab", ("tensor", "sequence")),
        ("heads", ("tensor", "sequence")),
        ("kv_heads", ("tensor", "sequence")),
        ("mlp", ("tensor", "sequence")),
        ("attended_heads", ("tensor", "sequence")),
        ("expert", ("tensor", "sequence")),
    )

    config.data = data = ConfigDict()
    data.train = source()  # of RL
    data.sft = source()  # of the cold start
    data.test = source()  # held out
    data.num_workers = 8  # threads per process that decode images and tokenise prompts
    # Shares in [0, 1] of the cold start's responses, on drawn sources. Repairs are drawn first,
    # then lucky responses, wrong readings and wrong results: each share is of the responses left.
    # The errors are confined to some kinds of question, see `care_jax/data/drawn/`.
    data.teacher_error = 0.0  # wrong results
    data.misread_share = 0.0  # source readings: wrong readings
    data.mixed_errors = False  # source readings: both errors in every kind of question
    data.lucky_share = 0.0  # source readings: wrong readings whose answer is right
    data.cue_share = 0.0  # rationales that contain the repair cue
    data.min_pixels = 262144  # (open) minimum height x width that images are resized to
    data.max_pixels = 1003520  # maximum; the paper's code, on Geometry3K alone, has 4194304
    # (prompt tokens, image patches) per prompt. A batch is padded to the smallest bucket that holds
    # all of its prompts. Prompts that fit no bucket are dropped and counted. Text only: ((512, 0),)
    data.buckets = ((576, 1792), (768, 2560), (1024, 4096), (1536, 5120), (2048, 6144))
    data.system_prompt = "You are a helpful assistant."
    # Appended to every question to state the format; {tag} is replaced by data.think_tag.
    data.instruction = (
        "First think about the reasoning process inside <{tag}> </{tag}> tags, then give the "
        "final answer inside <answer> </answer> tags."
    )
    data.think_tag = "think"  # tag of the rationale; Qwen3-VL: "reasoning" (app:exp_details)

    # Read by `python -m care_jax.commands.prepare`.
    data.prepare = prepare = ConfigDict()
    prepare.sources = ()  # sources to deduplicate, in order; the first of two equal examples stays
    prepare.benchmarks = ()  # sources whose images, or questions with like images, are left out
    prepare.near_bits = 20  # images match if at most this many of 144 perceptual-hash bits differ
    prepare.shard_megabytes = 256  # MiB after which an output shard is closed

    config.sft = sft = ConfigDict()
    sft.num_steps = 1000  # optimizer updates
    sft.eval_every = 0  # steps between evaluations inside the stage, and after its last; 0: none
    sft.batch_size = 128  # examples per step
    sft.microbatch_size = 0  # packed rows per microbatch on all devices, at least one per shard
    sft.learning_rate = 1e-5  # peak
    sft.warmup_steps = 50
    sft.schedule = "cosine"  # "constant" or "cosine" (to 0)
    sft.weight_decay = 0.01  # AdamW, on all parameters
    sft.max_grad_norm = 1.0  # the global gradient norm is clipped to this
    sft.max_skipped = 0  # non-finite updates skipped in a row; one more ends the run
    sft.answer_weight = 1.0  # loss weight of answer tokens; other response tokens have 1
    sft.row_tokens = 4096  # tokens of a packed row; longer examples are dropped
    sft.row_patches = 8192  # image patches of a packed row
    sft.row_lengths = 16  # lengths of a row, row_tokens the longest; each is a program to compile

    config.rl = rl = ConfigDict()
    rl.objective = "care"  # "care", "grpo", "dapo", "gspo", "dr_grpo", "rloo"
    rl.num_steps = 200  # rollout batches
    rl.eval_every = 0  # steps between evaluations, as sft.eval_every
    rl.num_rollouts = 8  # G, rollouts per prompt (tab:train_config)
    rl.prompts_per_step = 512  # (open) prompts per rollout batch
    rl.prompts_per_update = 128  # (open) prompts per optimizer update
    rl.microbatch_size = 0  # as sft.microbatch_size
    # Tokens of a row, into which prompts are packed with their responses. If the responses to a
    # prompt do not fit in one row, the prompt is repeated in several.
    rl.row_tokens = 8192
    rl.row_patches = 8192  # image patches of a packed row
    rl.row_lengths = 16  # as sft.row_lengths
    rl.decode_prompts = 64  # prompts in flight; a finished one is replaced by the next
    rl.decode_rows = 4  # rollouts in flight per prompt, likewise; 0: 2 on GPUs, else 8
    rl.max_response_tokens = 2048  # (open) T, including the forced tokens of a reflected row
    rl.temperature = 1.0  # (open)
    rl.top_p = 1.0  # (open)
    # Prompts still in flight when a step ends, as a share of prompts_per_step. They go on in the
    # next step, under newer weights, see docs/method.md. 0: a step waits for all of its prompts.
    rl.carry_over = 0.0
    rl.max_age = 2  # steps that a prompt may be carried over before a step waits for it
    rl.learning_rate = 1e-6  # (open) peak
    rl.warmup_steps = 0  # (open) optimizer updates
    rl.schedule = "constant"  # (open) "constant" or "cosine" (to 0)
    rl.weight_decay = 0.01  # (open)
    rl.max_grad_norm = 1.0  # (open)
    rl.max_skipped = 0  # as sft.max_skipped
    rl.format_weight = 0.1  # (open) λ of the reward (eq:overall)
    # Log-probabilities under π_old: "sampler", as recorded during sampling; "trainer", recomputed
    # by the trainer, which costs a forward pass. The metrics mismatch/* compare the two.
    rl.old_logp = "sampler"
    # Where the advantage is negative, a token's ratio to π_old counts as at most this (dual clip,
    # arXiv 1912.09729), above 1; 0: there is no such bound. verl, EasyR1, CARE's released code: 3.
    rl.dual_clip = 0.0
    # With old_logp "trainer": weighs each token's surrogate by π_old over the probability that the
    # sampler drew it with. "truncate": at most correction_cap; "mask": 0 outside [1 /
    # correction_cap, correction_cap]; "none": all weights are 1.
    rl.correction = "none"
    rl.correction_cap = 2.0
    # Routing replay of a mixture of experts: for response tokens the trainer reuses the sampler's
    # choice of experts, where its own router may round otherwise.
    rl.replay_routes = False

    # One section per objective, each with its clip range and KL weight (tab:train_config has those
    # of CARE, GRPO, DAPO and GSPO). Only the section of rl.objective is read; a key of another
    # section on the command line is an error.
    config.care = care = ConfigDict()
    # The importance ratio to π_old is clipped to [1 - clip_low, 1 + clip_high].
    care.clip_low = 0.20
    care.clip_high = 0.28
    care.beta = 0.02  # β, weight of the KL to the reference policy; 0: no reference is kept
    # What is a success: "acc", a right answer; "reward", a reward above 0, as in the released code,
    # where a wrong answer in the right format may be the anchor.
    care.success = "acc"
    care.anchor_rule = "shortest"  # success with the shortest rationale; "random": any success
    care.K = 4  # maximum number of hard negatives per prompt
    care.M = 6  # candidates of nearest_diverse: the M failures nearest to the anchor
    care.rule = "nearest_diverse"  # nearest, nearest_diverse, mixed, farthest, random
    care.s = 0.5  # scale of the negatives' advantages (eq:neg-scale)
    care.s_refl = 0.25  # scale of a reflected failure's advantage, s/2 (sec:care-reflection)
    care.delta = 0.1  # δ of the rescue's pseudo-rewards (eq:pseudoreward); normalisation cancels it
    care.eps = 1e-6  # (open) ε added to σ (eq:sigma-s)
    care.equalize = True  # A <- sqrt(K / K_S) A if a subgroup has only K_S < K negatives
    care.robust = False  # True: μ, σ are the trimmed mean and the median absolute deviation
    care.rescue = True  # all-failed groups get a pseudo-anchor (sec:rescue)
    care.rescue_scale = 1.0  # advantages of a rescued group are multiplied by this
    # False: weight 1 on every sampled token; with anchor_rule "random", since the shortest anchor
    # then makes rationales vanish on a small task (docs/experiments/dose).
    care.region_weights = True
    care.gamma_pos = 0.005  # γ⁺, weight of a correct rollout's rationale tokens; its answer: 1
    # Above 0, instead of gamma_pos: the rationale's share of a correct rollout's credit. gamma_pos
    # 0.005 gives 400 rationale tokens a share of 0.17 beside 10 answer tokens.
    care.gamma_share = 0.0
    care.gamma_neg = 0.0  # γ⁻, weight of rationale tokens in all other rollouts
    care.eps_w = 1e-6  # ε_w, added to the sum of a rollout's token weights (eq:token-adv)
    # "prompt": the mean over a prompt's S*, then over prompts (eq:ppo); "batch": over all S* at
    # once, under which a prompt's credit is the same for every K'; "tokens": over the tokens of all
    # rollouts, as in the released code, which needs kl_rows "all".
    care.mean = "prompt"
    # Rollouts over whose tokens the KL is averaged: "subgroup", those of S*; "all" (released code),
    # which trains on every rollout and takes as long as GRPO's update.
    care.kl_rows = "subgroup"
    care.reflect = True  # reflection-guided resampling (RGR)
    # "cue", or a control: "no_cue"; "resample", a fresh rollout without cue and failed rationale
    # (both in fig:rgr_ablation); "shuffled", the words of the cue in random order.
    care.reflect_mode = "cue"
    care.reflect_temperature = 0.0  # of the second decode; 0: rl.temperature. Released code: 0.6
    care.reflect_top_p = 0.0  # 0: rl.top_p. Released code: 0.95
    # The hard negative leaves S if its repair is a "success", or "always" (released code).
    care.reflect_replaces = "success"
    # A reflected row is trained with its forced context ("as_sampled") or without ("prompt_only").
    care.reflect_credit = "as_sampled"
    care.max_context = 1024  # maximum tokens of think tag and failed rationale in the context; T/2
    care.cue = CUE  # appended to the failed rationale, without a separator

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
    # overlong penalty grows from 0 to -1/2; 0: no penalty.
    dapo.overlong_share = 0.2

    config.gspo = gspo = ConfigDict()
    # Clip range of the sequence-level ratio. It is so narrow that in bfloat16 numerical differences
    # between sampler and trainer show up in mismatch/beyond_clip and clip_rate; rl.old_logp =
    # "trainer" takes them out of the ratio.
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
    # RLOO's paper has one update per rollout batch, so every ratio is 1 and nothing is clipped.
    rloo.clip_low = 0.20
    rloo.clip_high = 0.20
    rloo.beta = 0.0  # RLOO's KL is part of a preference reward; a verifier needs none

    config.evaluate = evaluate = ConfigDict()
    evaluate.batch_size = 64  # questions decoded at a time
    evaluate.max_response_tokens = 2048
    evaluate.temperature = 0.0  # 0: greedy; the paper samples as in training (app:exp_details)
    evaluate.top_p = 1.0  # needs a temperature above 0
    evaluate.num_samples = 1  # per question; above 1: acc is their mean, pass@k is estimated
    evaluate.decode_rows = 4  # samples in flight per question, at most num_samples
    evaluate.at_start = True  # with eval_every: also evaluate before the stage's first step
    # (name, path of the downloaded release) pairs, evaluated in addition to data.test, or alone if
    # data.test is not set. Names: mathvista, mathverse, mathvision, mathvision_testmini, mmmu,
    # mmmu_pro, mmmu_pro_vision.
    evaluate.benchmarks = ()
    # URL of an OpenAI-compatible endpoint, without /chat/completions, that judges the free-form
    # benchmark answers that the rules reject; JUDGE_API_KEY holds its key. Empty: no judge.
    evaluate.judge_url = ""
    evaluate.judge_model = ""  # model name in its requests
    evaluate.judge_timeout = 60.0  # seconds per request
    evaluate.judge_retries = 3  # retries of a failed request
    evaluate.judge_prices = (0.0, 0.0)  # per million (prompt, completion) tokens, to count cost

    # Exported checkpoint of the last training stage: "last", "best" by best_metric, or the number
    # of a saved step. A run without training evaluates the same checkpoint.
    config.export = export = ConfigDict()
    export.step = "last"

    # workdir/report.html: curves, and prompts with their images, responses and advantages.
    config.report = report = ConfigDict()
    report.groups_per_step = 4  # prompts per logged step, round-robin over their outcomes; 0: none
    report.max_megabytes = 16.0  # maximum MiB of the file; old steps are thinned out
    report.image_side = 448  # maximum pixels of an image's longer side
    # MiB per process of workdir/rollouts.jsonl and rollouts.1.jsonl, every response of the last
    # steps with its reward, components and advantage. 0: not written.
    report.rollouts_megabytes = 256.0

    config.metrics = metrics = ConfigDict()
    metrics.wandb_project = ""  # wandb project to log to (needs care_jax[wandb]); empty: no wandb
    # MLflow experiment to log to, at MLFLOW_TRACKING_URI (needs care_jax[mlflow]); empty: no MLflow
    metrics.mlflow_experiment = ""

    config.verifier = verifier = ConfigDict()
    verifier.num_workers = 2  # worker processes for computer algebra or the reward function
    verifier.timeout = 5.0  # seconds per answer, then wrong (reward function: per group)
    # "module:function" that replaces the built-in verifier: called with (question, responses,
    # Example), it returns a mapping of components in [0, 1] for each response of the group. Empty:
    # compare with the gold answer.
    verifier.reward = ""
    # The next keys apply to a reward function. (component, weight) pairs: their weighted sum
    # replaces acc in the reward (eq:overall).
    verifier.weights = (("acc", 1.0),)
    verifier.success = 0.5  # a response whose component acc is at least this is a success
    # RL ends if the function fails on a larger share of the responses of 5 steps, or on all of one.
    verifier.max_failed = 0.5
    verifier.concurrency = 16  # groups that each worker awaits at a time, for an async function
    return config.lock()  # so that a misspelt key in another file is an error
