"""Options that commands and the library share: the keywords of `LLM`, and where a command runs."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dflash_jax.argument_checks import wrong
from dflash_jax.checkpoint.quantize import FORMATS, QUANTIZE
from dflash_jax.engine.config import BATCH_SIZES, BlockSize
from dflash_jax.errors import InputError
from dflash_jax.ops.card import CHOICES
from dflash_jax.options import readers
from dflash_jax.options.option import Add, Alias, option
from dflash_jax.sampling_params import LOGPROBS_MODES

# More than any machine's memory.
MAX_BYTES = 2**50
_BYTES = {"least": 0, "most": MAX_BYTES, "zero": "none"}
_models, _load, _drafting = (partial(option, group=title) for title in ("models", "load", "drafting"))
_prompts = partial(option, group="prompts and defaults")
_media = partial(option, group="images and videos")
sampling = partial(option, group="sampling (defaults: the checkpoint's generation_config.json)")


@dataclass(frozen=True)
class LLMOptions:
    """The keywords of `LLM`, which the commands have as flags and the TOML of a system as keys."""

    target: str | Path | None = _models(
        None,
        "a Hugging Face directory or repo id; smollm2 is SmolLM2-135M-Instruct, downloaded once (default: the bundled "
        "tiny pair; of serve, smollm2 where there is a network)",
        "PATH|REPO",
        aliases="--model --model-path",
    )
    draft: str | Path | Sequence[str | Path] | None = _models(
        "auto",
        "the same for the drafter; mtp: the target's own MTP head; none: plain decoding; auto: the drafter that this "
        "package has or names for the target, if any; given again: one more, and each dispatch takes the fastest",
        "PATH|REPO|mtp|none",
        action=Add,
        aliases="--speculative-draft-model-path --speculative-draft-model --spec-model",
    )
    revision: str | None = _models(None, "branch, tag or commit of the target's repo", "REV")
    draft_revision: str | None = _models(
        None, "the same of the drafter's repo", "REV", aliases="--speculative-draft-model-revision"
    )
    download_dir: str | Path | None = _models(
        None, "where repos are kept (default: Hugging Face's cache, which HF_HOME moves)", "DIR"
    )
    hf_overrides: dict | None = _models(
        None,
        'in place of values of the target\'s config.json, merged: {"rope_scaling": {"factor": 4.0}}',
        "JSON",
        aliases="--json-model-override-args",
    )
    dtype: str | None = _models(
        None, "of the weights (default: float32 on CPU, bfloat16 elsewhere)", choices=("auto", "float32", "bfloat16")
    )
    quantize: str | None = _models(
        None,
        "quantize the target on loading (int4: in groups of 32 inputs, or 64, 128); none: a checkpoint in few bits, "
        "which otherwise stays so, becomes --dtype; the name of a format: its checkpoint must have it",
        choices=(*QUANTIZE, *FORMATS),
        aliases=Alias("--quantization -q", readers.quantization),
    )
    load_format: str = _models(
        "auto",
        "dummy: the target has random weights, of which only config.json is read, until update_weights gives others",
        choices=("auto", "safetensors", "dummy"),
    )
    kv_cache_dtype: str | None = _models(
        None,
        "of cached keys and values: fp8 (e4m3, with the checkpoint's scales or with bounds that follow from its "
        "weights) takes half of bfloat16's memory (default: as --dtype)",
        choices=("auto", "float32", "bfloat16", "bf16", "fp8", "fp8_e4m3"),
    )
    activations: str | None = _models(
        None,
        "fp4: the inputs of weights in NVFP4 are rounded to NVFP4, too, each token by itself (default: as --dtype)",
        choices=("auto", "fp4"),
    )
    mesh: str | None = _models(
        None,
        "devices that share the work, such as data=2,tensor=4 (default: the config's for this machine, else one)",
        "AXIS=N,...",
        aliases=(
            Alias("--tensor-parallel-size -tp --tp-size --tp", int, dest="tensor_parallel", means="`--mesh tensor=N`"),
            Alias("--data-parallel-size -dp --dp-size --dp", int, dest="data_parallel", means="`--mesh data=N`"),
        ),
    )
    decode_context_parallel_size: int = _models(
        1,
        "devices that share each page of keys and values, of those that would have copies of a KV head; the order of "
        "sums changes",
        "N",
        least=1,
        aliases="--dcp-size -dcp",
    )
    kernels: str = _models(
        "auto",
        "our own are Triton on a GPU, Pallas on a TPU and C++ on a CPU; all: also those that no card has run, of a TPU "
        "every one; xla: none of our own",
        choices=CHOICES,
    )
    max_len: int | None = _load(
        None,
        "tokens of a request, prompt and answer, at most (default: the model's positions; of serve, what fits)",
        "N",
        aliases="--max-model-len --context-length",
    )
    slots: int = _load(
        32,
        "requests that are continued at a time",
        "N",
        least=1,
        most=BATCH_SIZES[-1],
        aliases="--max-num-seqs --max-running-requests",
    )
    mem_fraction: float = _load(
        0.9,
        "share of a device's memory that may be used",
        "F",
        above=0,
        most=1,
        aliases="--gpu-memory-utilization --device-memory-utilization --mem-fraction-static",
    )
    prefix_bytes: int | None = _load(
        None,
        "memory of a device for prefixes that prompts share (default: a twentieth, 256 MiB on CPU)",
        "N",
        **_BYTES,
        aliases=Alias("--no-enable-prefix-caching --disable-radix-cache", const=0),
    )
    prefix_host_bytes: int | None = _load(
        None,
        "the host's pinned memory for prefixes that the device has no room for (default: a quarter of what is free; "
        "none on CPU)",
        "N",
        **_BYTES,
    )
    swap_space: float | None = _load(
        None,
        "the host's memory for each device, for requests whose pages leave it; others compute their tokens again "
        "(default: a quarter of what is free)",
        "GIB",
        least=0,
        most=MAX_BYTES >> 30,
        zero="none",
    )
    block_size: BlockSize = _drafting(
        "auto",
        "tokens that a round may yield; 1 is plain decoding; auto, the default, takes what is fastest",
        "B",
        read=readers.block_size,
    )
    max_block_size: int | None = _drafting(
        None,
        "the largest that auto takes (default: the drafter's own)",
        "B",
        least=1,
        aliases=(
            Alias(
                "--speculative-config -sc",
                readers.json_object,
                dest="speculative_config",
                means="--draft, --draft-revision and the largest block, from JSON",
            ),
            Alias(
                "--speculative-algorithm --spec-method",
                readers.algorithm,
                dest="speculative_algorithm",
                means="DFLASH, or --draft mtp by NEXTN, EAGLE, mtp and vLLM's names of it",
            ),
            Alias(
                "--speculative-num-steps",
                int,
                dest="speculative_num_steps",
                means="--max-block-size of an MTP head; DFlash takes 1",
            ),
            "--speculative-num-draft-tokens --speculative-dflash-block-size",
            Alias("--spec-tokens", readers.drafted),
        ),
    )
    draft_window_size: int | None = _drafting(
        None,
        "last positions of the context that the drafter sees (default: all)",
        "W",
        least=1,
        most=10**9,
        aliases="--speculative-dflash-draft-window-size --speculative-draft-window-size",
    )
    draft_sink_size: int = _drafting(
        0, "first positions that it sees besides", "S", least=0, aliases="--speculative-draft-sink-size"
    )
    draft_tokens: str | Path | None = _drafting(
        "auto",
        "JSON list of the only ids that any drafter drafts; none: all (default: each drafter's draft_tokens.json, if "
        "any)",
        "FILE|none",
        aliases="--speculative-token-map",
    )
    reproducible: bool = _drafting(
        False,
        "the same bits with any drafter, block size and load, in bfloat16 too, at some cost in speed",
        aliases=Alias("--enable-deterministic-inference", const=True),
    )
    tokenizer: str | Path | None = _prompts(
        None, "a directory or repo id (default: the target's)", "PATH|REPO", aliases="--tokenizer-path"
    )
    chat_template: str | None = _prompts(
        None,
        "Jinja, by path or as it is (default: the tokenizer's)",
        "FILE|TEXT",
        aliases=Alias(
            "--reasoning-config",
            readers.thinking_marks,
            dest="reasoning_config",
            means="must name `<think>` and `</think>`",
        ),
    )
    chat_template_kwargs: dict | None = _prompts(
        None,
        'defaults of the template, such as {"enable_thinking": false}',
        "JSON",
        flag="--default-chat-template-kwargs",
    )
    generation_config: str | Path = _prompts(
        "auto",
        "sampling defaults: the target's generation_config.json, vllm: none, or another file's",
        "auto|vllm|PATH",
        aliases=Alias("--sampling-defaults", readers.sampling_defaults),
    )
    sampling_defaults: dict | None = _prompts(
        None,
        'in place of those defaults, such as {"temperature": 0.6}',
        "JSON",
        flag="--override-generation-config",
        aliases="--preferred-sampling-params",
    )
    logprobs_mode: str | None = _prompts(
        None,
        "what log-probabilities are, unless the request says it (default: raw_logprobs; of /generate scaled_logprobs)",
        choices=LOGPROBS_MODES,
    )
    seed: int | None = option(None, "of the seeds that requests without one get (default: random)", flag=None)
    language_model_only: bool = _media(
        False,
        "without the vision tower: text only, and none of its memory",
        aliases=(Alias("--no-enable-multimodal", const=True), Alias("--enable-multimodal", const=False)),
    )
    limit_mm_per_prompt: dict | None = _media(
        None, 'most of a prompt (default: {"image": 8, "video": 1})', "JSON", aliases="--limit-mm-data-per-request"
    )
    media_cache_bytes: int = _media(
        2**28, "of the host's memory, for outputs of the vision tower", "N", least=0, most=MAX_BYTES, zero="none"
    )
    allowed_media_domains: list[str] | None = _media(
        None,
        "hosts that http: and https: URLs may name, * for any public one (default: none, data: URLs only)",
        "HOST",
        action=Add,
    )
    allowed_local_media_path: str | Path | None = _media(
        None, "directory that file: URLs may name (default: none)", "DIR"
    )


def has_fp8_caches(kv_cache_dtype: str | None, dtype: str) -> bool:
    """Whether keys and values are in FP8.

    Args:
        kv_cache_dtype: The option.
        dtype: Dtype of the weights, "float32" or "bfloat16".

    Raises:
        ArgumentError: It is another dtype than the weights'.
    """
    if kv_cache_dtype in ("float32", "bfloat16", "bf16") and kv_cache_dtype.replace("bf16", "bfloat16") != dtype:
        raise wrong("kv_cache_dtype", kv_cache_dtype, f"fp8, or {dtype}, the dtype of the weights")
    return kv_cache_dtype is not None and kv_cache_dtype.startswith("fp8")


@dataclass(frozen=True)
class CommandOptions:
    """Where a command finds its model, and where it runs."""

    model: str | None = _models(None, "the target", "MODEL", flag="model")
    config: str | None = _models(None, "a name of configs/, or a TOML; options override it", "NAME|FILE")
    platform: str | None = _models(
        None,
        "default: the best that JAX finds",
        choices=("cpu", "cuda", "tpu"),
        aliases=Alias("--device", readers.platform),
    )
    distributed: bool = _models(
        False, "one of several processes that run one model, as the cluster's environment says; the first one answers"
    )


@dataclass(frozen=True)
class SamplingOptions:
    """The sampling parameters that `generate` has as flags, and the TOML of a system under [sampling]."""

    temperature: float | None = sampling(None, "0 is greedy")
    top_k: int | None = sampling(None, "keep the K likeliest tokens; 0 is off", "K")
    top_p: float | None = sampling(None, "keep the likeliest tokens of mass P; 1 is off", "P")
    min_p: float | None = sampling(None, "keep tokens of at least P times the best one's probability", "P")
    repetition_penalty: float | None = sampling(None, "1 is off", "R")
    frequency_penalty: float = sampling(0.0, "added for each time that a token is in the output", "F")
    presence_penalty: float = sampling(0.0, "added for each token that is in the output", "F")


def take_model(args: argparse.Namespace) -> None:
    """Makes MODEL the target. Raises InputError where another one is named beside it."""
    if args.model is not None:
        if args.target not in (None, args.model):
            raise InputError(f"MODEL {args.model} and --target {args.target}: give one of them")
        args.target = args.model
