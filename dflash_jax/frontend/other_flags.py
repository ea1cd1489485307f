"""The flags of vLLM 0.33 and SGLang 0.5.23 beside those that this server has: each needs nothing here, or is refused.

A flag of `NOTHING` cannot change memory, numbers or text here: any value is accepted, with a notice. One of `REFUSED`
could: it is accepted at its neutral values only. `dflash_jax.aliases` has the flags that do something here.

A word of a group is ``--flag`` for a switch (``--flag!``: on is neutral, off is not), ``--flag=a|b`` for a flag of one
value whose neutral values are a and b, ``--flag+=`` for one of several values; ``--flag/-f`` has two names. A switch
has its ``--no-flag``, too.
"""

import re
from dataclasses import dataclass

# Values that mean "as by default" for any flag.
NEUTRAL = {"", "none", "null"}
# Flags whose values no message shows.
SECRETS = {"--hf-token", "--admin-api-key", "--watermark-key", "--watermark-key-b"}


@dataclass(frozen=True)
class Group:
    """Flags that share a reason."""

    reason: str
    words: str


NOTHING = (
    Group(
        "there is one implementation, compiled for the device",
        """
        --watchdog-timeout= --soft-watchdog-timeout= --gc-threshold+= --attention-backend=
        --decode-attention-backend= --enable-nvidia-megakernel --enable-amd-monokernel --prefill-attention-backend=
        --sampling-backend= --grammar-backend= --bf16-gemm-backend= --dsa-prefill-backend= --dsv4-prefill-backend=
        --dsa-triton-union= --dsa-decode-backend= --dsv4-attn-backend= --dsa-paged-mqa-logits-backend=
        --dsa-topk-backend= --disable-flashinfer-autotune --flashinfer-autotune-skip-ops+=
        --triton-attention-num-kv-splits= --triton-attention-split-tile-size= --flashinfer-mla-disable-ragged
        --enable-fused-qk-norm-rope --enable-dsa-fused-indexer --mamba-backend= --linear-attn-backend=
        --linear-attn-decode-backend= --linear-attn-prefill-backend= --linear-attn-verify-backend=
        --enable-nccl-nvls --enable-symm-mem --disable-custom-all-reduce --enable-mscclpp --enable-scattered-sconv
        --pre-warm-nccl --boundary-reduction= --enable-flashinfer-allreduce-fusion
        --enforce-disable-flashinfer-allreduce-fusion --flashinfer-allreduce-fusion-backend=
        --enable-aiter-allreduce-fusion --disable-aiter-allreduce-fusion-in-prefill
        --disable-aiter-allreduce-fusion-in-decode --enable-fused-moe-sum-all-reduce --moe-a2a-backend=
        --deepep-v2-mode= --deepep-mode= --fuseep-mode= --deepep-config= --enable-p2p-check
        --enable-http-worker-reuseport --disable-cascade-attn --enable-nccl-comm-suspend --mamba-ssu-algorithm=
        --distributed-timeout-seconds= --cpu-distributed-timeout-seconds= --enable-expert-parallel/-ep
        --all2all-backend= --enable-shm-tensor-arena --dp-sync-interval= --disable-nccl-for-dp-synchronization
        --prefix-caching-hash-algo= --enable-flashinfer-autotune --monokernel --moe-backend= --linear-backend=
        --kernel-config= --watchdog-config= --fail-on-environ-validation --gdn-prefill-backend=
        --kda-prefill-backend= --kda-decode-backend= --enable-flash-late-interaction --nccl-port= --dist-timeout=
        --load-balance-method= --distributed-executor-backend= --max-parallel-loading-workers=
        --enable-lean-attention --fp8-gemm-runner-backend/--fp8-gemm-backend=
        --fp4-gemm-runner-backend/--fp4-gemm-backend= --triton-attention-reduce-in-fp32 --moe-runner-backend=
        --disable-flashinfer-cutlass-moe-fp4-allgather --sleep-on-idle --sparse-indexer-topk-backend=
        --enable-two-batch-overlap --enable-single-batch-overlap --tbo-token-distribution-threshold= --enable-dbo
        --ubatch-size= --dbo-decode-token-threshold= --dbo-prefill-token-threshold= --ir-op-priority=
        --enable-layerwise-nvtx-marker --ray-workers-use-nsight --enable-layerwise-nvtx-tracing
        --speculative-boundary-reduction= --speculative-attention-mode= --speculative-draft-attention-backend=
        --speculative-dsa-topk-backend= --speculative-moe-runner-backend= --speculative-moe-a2a-backend=
        --guided-decoding-backend= --structured-outputs-config.backend=
        --disable-flashinfer
        """,
    ),
    Group(
        "recurrent states are rolled back by replay: there are no snapshots to arrange",
        """
        --enable-linear-replayssm --enable-linear-replayssm-spec --mamba-cache-mode=
        --enable-mamba-shared-prefix-checkpoint --replayssm-buffer-len= --use-replayssm --mamba-max-states-per-path=
        --mamba-radix-cache-strategy= --uses-mamba-radix-cache --mamba-track-interval= --mamba-block-size=
        --prefix-match-unit= --linear-replayssm-cache-len= --mamba-scheduler-strategy=
        """,
    ),
    Group(
        "requests wait in the order of their priority, then of their arrival",
        """
        --pp-max-micro-batch-size= --pp-async-batch-depth= --prefill-delayer-token-usage-low-watermark= --watermark=
        --disable-chunked-prefix-cache --num-reserved-decode-tokens= --prefill-decode-interval=
        --prefill-decode-interval-min-bs= --enable-dynamic-chunking --max-prefill-tokens= --prefill-max-requests=
        --schedule-policy= --enable-priority-scheduling --disable-priority-preemption
        --priority-scheduling-preemption-threshold= --schedule-conservativeness= --num-continuous-decode-steps=
        --scheduler-recv-interval= --enable-mixed-chunk --enable-prefill-delayer --prefill-delayer-max-delay-passes=
        --prefill-delayer-queue-min-ratio= --prefill-delayer-max-delay-ms= --max-num-scheduled-tokens=
        --long-prefill-token-threshold= --long-prefill-token-threshold-adaptive --scheduling-policy=
        --scheduler-reserve-full-isl --prefill-schedule-interval= --prefill-delayer-forward-passes-buckets+=
        --prefill-delayer-wait-seconds-buckets+=
        """,
    ),
    Group(
        "programs are compiled beside requests (--warm-up full: before), and the host's work overlaps the device's",
        """
        --disable-outlines-disk-cache --cuda-graph-config= --cuda-graph-backend-decode=
        --cuda-graph-backend-prefill= --cuda-graph-max-bs-decode= --cuda-graph-max-bs-prefill=
        --cuda-graph-max-seq-len-prefill= --cuda-graph-bs-decode+= --cuda-graph-bs-prefill+=
        --disable-prefill-cuda-graph --disable-decode-cuda-graph --disable-cuda-graph --disable-cuda-graph-padding
        --enable-cudagraph-gc --enable-torch-compile --enable-torch-compile-debug-mode --torch-compile-max-bs=
        --enable-torch-symm-mem --skip-server-warmup --enforce-eager --jit-monitor-mode= --jit-monitor-verbose
        --cudagraph-capture-sizes+= --max-cudagraph-capture-size= --compilation-config/-cc= --optimization-level=
        --performance-mode= --cuda-graph-prefill-max-context/--context-bucket= --disable-overlap-schedule
        --async-scheduling --enable-profile-cuda-graph --debug-cuda-graph --cuda-graph-max-bs=
        --max-seq-len-to-capture= -O=
        """,
    ),
    Group(
        "figures are in /metrics and /server_info, the access log at --log-level info",
        """
        --log-level-http= --show-time-cost --enable-mfu-metrics --load-snapshot-publish-interval=
        --gc-warning-threshold-secs= --decode-log-interval= --enable-request-time-stats-logging --kv-cache-metrics
        --kv-cache-metrics-sample= --cudagraph-metrics --enable-logging-iteration-details --disable-log-stats
        --aggregate-engine-logging --enable-log-deltas --log-error-stack --disable-uvicorn-access-log
        """,
    ),
    Group("no code from a checkpoint is ever run", "--trust-remote-code"),
    Group(
        "weights are mapped and read as the disk delivers them",
        """
        --startup-weight-load-mode= --weight-loader-disable-mmap --weight-loader-prefetch-checkpoints
        --weight-loader-prefetch-num-threads= --weight-loader-drop-cache-after-load --safetensors-load-strategy=
        --safetensors-prefetch-num-threads= --safetensors-prefetch-block-size= --ignore-patterns+=
        --use-tqdm-on-load --pt-load-map-location=
        """,
    ),
    Group(
        "it is always on",
        """
        --enable-metrics --enable-cache-report --enable-prefix-caching --enable-chunked-prefill
        --enable-auto-tool-choice --enable-prompt-tokens-details --enable-server-load-tracking
        --enable-tokenizer-info-endpoint --enable-offline-docs --enable-response-store
        """,
    ),
    Group(
        "tokenizers run as the load needs",
        """
        --tokenizer-backend= --tokenizer-worker-num= --detokenizer-worker-num= --batch-notify-size=
        --enable-dynamic-batch-tokenizer --dynamic-batch-tokenizer-batch-size=
        --dynamic-batch-tokenizer-batch-timeout= --enable-tokenizer-batch-encode --disable-tokenizer-batch-decode
        --renderer-num-workers=
        """,
    ),
    Group(
        "the format follows from the checkpoint's chat template",
        """
        --reasoning-parser= --chat-template-content-format= --tool-call-parser=
        """,
    ),
    Group(
        "each request has its own seed; a request without one takes a fresh seed",
        """
        --seed= --random-seed=
        """,
    ),
    Group("nothing of a request is logged without --enable-log-requests", "--disable-log-requests"),
)
REFUSED = (
    Group(
        "the server exchanges no weights, caches or requests with another one",
        """
        --language-only --decoupled-spec-bind-endpoint= --decoupled-spec-connect-endpoints+= --decoupled-spec-rank=
        --decoupled-spec-role=null --disaggregation-mode=null --disaggregation-decode-allocation-policy=early
        --disaggregation-transfer-backend=mooncake --disaggregation-enable-kv-checksum
        --disaggregation-bootstrap-port=8998 --disaggregation-ib-device= --disaggregation-decode-enable-radix-cache
        --disaggregation-decode-enable-offload-kvcache --disaggregation-decode-retraction-backup=
        --disaggregation-decode-extra-slots= --disaggregation-decode-polling-interval=1 --enable-pd-role-switch
        --optimistic-prefill-attempts=0 --enable-pdmux --pdmux-config-path= --sm-group-num=8
        --disaggregation-decode-host-receive-threshold=1.0 --mooncake-ib-device=
        --remote-instance-weight-loader-seed-instance-ip=
        --remote-instance-weight-loader-seed-instance-service-port=
        --remote-instance-weight-loader-send-weights-group-ports+= --remote-instance-weight-loader-backend=nccl
        --remote-instance-weight-loader-start-seed-via-transfer-engine --engine-info-bootstrap-port=6789
        --modelexpress-config= --checkpoint-engine-wait-weights-before-ready --weight-cache-mode=off
        --weight-cache-socket= --weight-cache-timeout=1800 --kv-events-config= --load-publish-endpoint=
        --kv-transfer-config= --weight-transfer-config=
        """,
    ),
    Group("prompts and answers are logged by --log-prompts only", "--log-requests-level=0|1"),
    Group(
        "one copy of the model is served, on the hosts of --distributed: --mesh data=N,tensor=N names its devices",
        """
        --base-gpu-id=0 --gpu-id-step=1 --use-ray --numa-node= --dist-init-addr/--nccl-init-addr=
        --gated-launch-port= --nnodes/-n=1 --node-rank/-r=0
        --pp-size/--pipeline-parallel-size/-pp=1 --attn-dp-size/--attention-data-parallel-size=1
        --attn-cp-size/--attention-context-parallel-size=1 --moe-dp-size/--moe-data-parallel-size=1 --dwdp-size=1
        --dcp-comm-backend= --dcp-replicate-q-proj --enable-prefill-cp --cp-strategy= --enable-cp-tp-group-sharing
        --enable-dsa-cache-layer-split --enable-cp-decode-attn-tp --enable-dp-attention
        --enable-dp-attention-local-control-broadcast --enable-dp-lm-head --enable-tp-lm-head-all-to-all
        --enable-attn-tp-input-scattered --enable-shared-experts-attn-tp --shared-experts-tp-size=
        --enable-dense-mlp-attn-tp --enable-layernorm-sp --enable-megamoe-for-layernorm-sp --disable-attn-tp-gather
        --moe-dense-tp-size= --master-addr=127.0.0.1 --master-port=29501 --numa-bind
        --numa-bind-nodes+= --numa-bind-cpus+= --device-ids+=
        --dcp-q-replicate --dcp-kv-cache-interleave-size=1 --cp-kv-cache-interleave-size=
        --prefill-context-parallel-size/-pcp=1 --data-parallel-rank/-dpn= --data-parallel-start-rank/-dpr=
        --data-parallel-size-local/-dpl= --data-parallel-address/-dpa= --data-parallel-rpc-port/-dpp=
        --data-parallel-backend/-dpb=mp --data-parallel-hybrid-lb/-dph --data-parallel-external-lb/-dpe
        --data-parallel-multi-port-external-lb/-dpm --enable-hc-sp --enable-batch-sharded-sampling --worker-cls=auto
        --worker-extension-cls= --enable-fault-tolerance --fault-tolerance-config={} --enable-scale-out
        --data-parallel-supervisor-port=9256 --dp-supervisor-probe-interval-s=5.0
        --dp-supervisor-probe-timeout-s=5.0 --dp-supervisor-probe-failure-threshold=3 --headless
        --api-server-count/-asc=1
        """,
    ),
    Group(
        "logs, metrics and traces have one form",
        """
        --enable-metrics-for-all-schedulers --log-requests-format=text
        --log-requests-target= --uvicorn-access-log-exclude-prefixes+= --crash-dump-folder=
        --tokenizer-metrics-custom-labels-header=x-custom-labels --tokenizer-metrics-allowed-custom-labels+=
        --extra-metric-labels= --bucket-time-to-first-token+= --bucket-inter-token-latency+=
        --bucket-e2e-request-latency+= --prompt-tokens-buckets+= --generation-tokens-buckets+=
        --enable-forward-pass-metrics --forward-pass-metrics-worker-id= --forward-pass-metrics-ipc-name=
        --trace-modules=request --export-metrics-to-file --export-metrics-to-file-dir= --kv-canary=none
        --kv-canary-sweep-interval=0 --debug-tensor-dump-output-folder= --debug-tensor-dump-layers+=
        --debug-tensor-dump-input-file= --msprobe-dump-config= --enable-trace-replay --logging-config=
        --log-config-file= --show-hidden-metrics-for-version= --collect-detailed-traces+=
        --custom-histogram-buckets+= --profiler-config={} --enable-log-outputs --disable-access-log-for-endpoints=
        --spec-trace-dir=
        """,
    ),
    Group(
        "the model is computed as its checkpoint says",
        """
        --mlx-enable-sampling --enable-fp32-lm-head --enable-tf32-matmul --enable-custom-logit-processor
        --enable-watermark --watermark-config= --watermark-key= --watermark-key-b= --watermark-context-window=4
        --watermark-mixing-probability=0.5 --watermark-max-probability=1.0 --watermark-default-enabled
        --watermark-enforce-all --enable-precise-embedding-interpolation --enable-deepseek-v4-fp4-indexer
        --enable-quant-communications --enable-w4a4-mxfp4-megamoe --flashinfer-mxfp4-moe-precision=default
        --deepep-dispatcher-output-dtype=auto --flashinfer-a2a-dispatch-type= --rl-on-policy-target=
        --load-format=auto|safetensors --model-loader-extra-config={} --is-embedding --model-impl=auto
        --model-config-parser=auto --quantization-param-path= --modelopt-quant=
        --modelopt-checkpoint-restore-path= --modelopt-checkpoint-save-path= --modelopt-export-path=
        --quantize-and-serve --rl-quant-profile= --custom-weight-loader+= --decrypted-config-file=
        --decrypted-draft-config-file= --tokenizer-mode=auto|fast|hf --skip-tokenizer-init --hf-chat-template-name=
        --completion-template= --runner=auto|generate --convert=auto --hf-config-path= --code-revision=
        --tokenizer-revision= --quantization-config= --allow-deprecated-quantization --use-fp64-gumbel
        --disable-sliding-window --config-format=auto --model-class-overrides={} --pooler-config=
        --logits-processors+= --attention-config/-ac={} --additional-config={} --task=auto|generate
        """,
    ),
    Group(
        "memory is divided by --slots, --max-len, --max-total-tokens, --prefix-bytes, --prefix-host-bytes and "
        "--mem-fraction",
        """
        --enable-memory-saver --enable-weights-cpu-backup --enable-draft-weights-cpu-backup
        --enable-encoder-swa-bounded-replay --enable-decoder-swa-bounded-replay --enable-int8-mamba-checkpoint
        --int8-mamba-ckpt-size= --cpu-offload-gb=0 --offload-group-size=-1|0 --offload-num-in-group=1
        --offload-prefetch-step=1 --offload-mode=cpu --ple-offload-embedding --ple-offload-backend=pinned
        --ple-offload-dir= --radix-eviction-policy=lru --radix-eviction-policy-config= --enable-page-major-kv-layout
        --enable-unified-memory --enable-session-radix-cache --radix-cache-backend=
        --enable-hierarchical-cache/--enable-hicache --hicache-host-memory-mode=cache --hicache-ratio=
        --hicache-size=0 --hicache-host-memory-fraction=0.8 --hicache-write-policy=write_through
        --hicache-io-backend=kernel --hicache-mem-layout=page_first --hicache-storage-backend=
        --hicache-storage-prefetch-policy=timeout --hicache-storage-backend-extra-config=
        --hicache-storage-prefetch-retry-poll-interval=8 --hicache-storage-prefetch-retry-max-attempts=8
        --enable-unified-cache-external-linker --unified-cache-external-linker-backend=mooncake
        --unified-cache-external-linker-config= --enable-linker-mla-dedup --enable-hisparse
        --hisparse-config/--hierarchical-sparse-attention-extra-config= --enable-lmcache --lmcache-config-file=
        --enable-flexkv --flexkv-config-file= --enable-kv-cache-sharding --page-size=0|1|256|none
        --c128-page-size=16 --swa-full-tokens-ratio= --swa-prefix-tails= --disable-hybrid-swa-memory
        --prefill-only-disable-kv-cache --max-mamba-cache-size= --mamba-full-memory-ratio= --enable-sleep-mode
        --sleep-mode-backend=cumem --sleep-mode-offload-cudagraph --sleep-preserve-parameter-names+=
        --enable-cumem-allocator --kv-cache-memory-bytes= --num-gpu-blocks-override=
        --prefix-cache-retention-interval=0 --kv-sharing-fast-prefill --swa-bounded-replay! --kv-offloading-size=
        --kv-offloading-backend=native --offload-backend=auto --cpu-offload-params+= --offload-params+=
        --max-num-active-seqs= --disable-hybrid-kv-cache-manager
        """,
    ),
    Group(
        "the server loads no code and starts no other program",
        """
        --io-processor-plugin= --model-checksum= --delete-ckpt-after-loading --forward-hooks+= --sidecar=
        --sidecar-args+= --warmups= --tool-server= --reasoning-parser-plugin= --tool-parser-plugin= --middleware+=
        --scheduler-cls=
        """,
    ),
    Group(
        "images and videos are read as the checkpoint says, and other media are not",
        """
        --encoder-only --encoder-transfer-backend=auto --encoder-urls+= --encoder-bootstrap-port=8997
        --encoder-register-urls+= --enable-adaptive-dispatch-to-encoder --enable-mis
        --mm-attention-backend= --enable-broadcast-mm-inputs-process --enable-prefix-mm-cache --mm-enable-dp-encoder
        --mm-process-config= --mm-processor-worker-num=0 --mm-io-worker-num=0
        --media-url-max-file-size-mb=64 --mm-preprocess-cache-size-mb= --trust-mm-content-hashes
        --enable-mm-global-cache --image-processor-backend=auto
        --mm-global-cache-backend=mooncake --disable-fast-image-processor --mm-feature-transport=
        --asr-max-buffer-seconds=60 --asr-max-concurrent-sessions=32
        --enable-prompt-embeds --enable-mm-embeds --media-io-kwargs={}
        --mm-processor-kwargs= --mm-processor-cache-gb=4 --mm-processor-cache-type=lru --mm-hasher-algorithm=blake3
        --mm-shm-cache-max-object-size-mb=128 --mm-encoder-only --mm-encoder-tp-mode=weights
        --mm-encoder-attn-backend= --mm-encoder-attn-dtype= --mm-encoder-fp8-scale-path=
        --mm-encoder-fp8-scale-save-path= --mm-encoder-fp8-scale-save-margin=1.5 --interleave-mm-strings
        --skip-mm-profiling --video-pruning-rate= --video-pruning-method=evs --mm-tensor-ipc=direct_rpc
        --mm-processor-device=auto --mm-ipc-gpu-memory-gb=0 --mm-device-do-normalize! --disable-chunked-mm-input
        --ec-transfer-config= --ec-manager-config={} --trust-request-mm-kwargs
        """,
    ),
    Group(
        "it would change what answers hold; a request can ask for it where it is possible",
        """
        --enable-return-hidden-states --return-hidden-states-mode= --enable-return-aux-hidden-states
        --aux-hidden-state-capture= --return-aux-hidden-state-layer-ids+= --enable-return-routed-experts
        --enable-return-indexer-topk --sampling-mask-max-tokens=4096 --weight-version=default --return-input-ids
        --return-output-ids --strip-thinking-cache --enable-strict-thinking --allow-auto-truncate
        --enable-streaming-session
        --constrained-json-whitespace-pattern= --constrained-json-disable-any-whitespace
        --constrained-json-max-whitespace-cnt= --return-sampling-mask --logprobs-mode=raw_logprobs
        --per-request-spec-decode-metrics=none --structured-outputs-config={}
        --aux-output-config={} --reasoning-effort-map= --response-role=assistant
        --exclude-tools-when-tool-choice-none --tool-strict-level=
        --anthropic-disabled-thinking-effort=auto --tokens-only --fingerprint-mode=full
        --fingerprint-value= --cohere-is-reasoning-model! --cohere-format=cmd4
        """,
    ),
    Group(
        "caches and states have the model's dtypes",
        """
        --prefill-kv-cache-dequant-dtype=auto --mamba-ssm-dtype=auto|float32
        --enable-mamba-cache-stochastic-rounding --mamba-cache-philox-rounds=0 --kv-cache-dtype=auto
        --qsa-indexer-dtype=auto --speculative-draft-kv-cache-dtype= --kv-cache-dtype-skip-layers+=
        --mamba-cache-dtype=auto --mamba-ssm-cache-dtype=auto|float32
        """,
    ),
    Group(
        "requests wait in the order of their priority, then of their arrival; --max-queue bounds how many",
        """
        --default-priority-value= --abort-on-priority-when-disabled --schedule-low-priority-values-first
        --retraction-policy=length --min-free-slots-delay= --max-num-queued-tokens=
        """,
    ),
    Group(
        "the server speaks HTTP/1.1, with its own limits and pages",
        """
        --smg-http-sidecar-port/--grpc-http-sidecar-port= --smg-grpc-mode --grpc-mode --grpc-port=
        --grpc-response-timeout-secs=300 --grpc-worker-threads= --enable-http2 --http2-max-concurrent-streams=200
        --http2-initial-connection-window-size=1048576 --enable-ssl-refresh --admin-api-key= --file-storage-path=
        --ssl-ciphers=TLSv1
        --disable-fastapi-docs
        --h11-max-incomplete-event-size=4194304 --h11-max-header-count=256 --grpc
        """,
    ),
    Group(
        "experts are spread by --mesh expert=N only",
        """
        --ep-num-redundant-experts=0 --ep-dispatch-algorithm= --init-expert-location=trivial --enable-eplb
        --eplb-algorithm=auto --eplb-rebalance-num-iterations=1000 --eplb-rebalance-layers-per-chunk=
        --eplb-min-rebalancing-utilization-threshold=1.0 --expert-distribution-recorder-mode=
        --expert-distribution-recorder-buffer-size= --expert-balancedness-report-mode=off --elastic-ep-backend=
        --enable-elastic-expert-backup --enable-waterfill --ep-join-mode/--elastic-ep-join-mode=
        --elastic-ep-scale-timeout=600 --disable-shared-experts-fusion --enforce-shared-experts-fusion
        --enable-paged-experts --paged-experts-num-resident= --kt-weight-path= --kt-method=AMXINT4 --kt-cpuinfer=
        --kt-threadpool-count=2 --kt-num-gpu-experts= --kt-max-deferred-experts-per-token=
        --ep-size/--ep/--expert-parallel-size=1 --ep-join-rank-offset/--elastic-ep-join-rank-offset=0
        --elastic-ep-initial-size= --max-ep-size= --enable-ep-weight-filter --enable-elastic-ep
        --elastic-ep-max-dp-size= --eplb-config={} --expert-placement-strategy=linear
        """,
    ),
    Group(
        "drafts are one chain, of DFlash or an MTP head, and accepted only where they equal the target's own tokens",
        """
        --dllm-algorithm= --dllm-algorithm-config= --dllm-fdfo! --speculative-draft-load-format=
        --speculative-eagle-topk=1 --speculative-domino-candidate-pool-size=2048
        --speculative-dspark-block-size= --speculative-dspark-sps-table-path=
        --speculative-dspark-confidence-sts-path= --speculative-dspark-align-verify-tokens-to-graph-tier
        --speculative-accept-threshold-single=1.0 --speculative-accept-threshold-acc=1.0
        --speculative-use-rejection-sampling --speculative-use-block-verification
        --speculative-enable-w4a4-mxfp4-megamoe --speculative-draft-model-quantization= --enable-multi-layer-eagle
        --speculative-adaptive --speculative-adaptive-config= --speculative-ngram-min-bfs-breadth=1
        --speculative-ngram-max-bfs-breadth=10 --speculative-ngram-match-type=BFS
        --speculative-ngram-max-trie-depth=18 --speculative-ngram-capacity=10000000
        --speculative-ngram-external-corpus-path= --speculative-ngram-external-sam-budget=0
        --speculative-ngram-external-corpus-max-tokens=10000000 --diffusion-config/-dc= --engram-config=
        """,
    ),
    Group(
        "LoRA adapters are not supported",
        """
        --enable-lora --enable-lora-overlap-loading --max-lora-rank=16 --lora-target-modules= --lora-paths=
        --max-loaded-loras= --max-loras-per-batch=8 --lora-eviction-policy=lru --lora-backend=csgmv
        --max-lora-chunk-size=16 --experts-shared-outer-loras --lora-use-virtual-experts --lora-strict-loading
        --lora-drain-wait-threshold=0.0 --uno-lora-path= --max-loras=1 --lora-dtype=auto
        --enable-tower-connector-lora --max-cpu-loras= --fully-sharded-loras --default-mm-loras=
        --specialize-active-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras --max-lora-cls-labels=
        --lora-modules+=
        """,
    ),
    Group("set HF_TOKEN instead: others can read the process list", "--hf-token"),
)


def read_word(word: str) -> tuple[list[str], bool, bool, tuple[str, ...] | None]:
    """A word: (names, whether on is neutral, whether there are several values, neutral values; None for a switch)."""
    match = re.fullmatch(r"([^!+=]+)(!?)(\+?)(=.*)?", word)
    assert match is not None, word
    names, is_on, several, values = match.groups()
    neutral = None if values is None else tuple(filter(None, values[1:].split("|")))
    return names.split("/"), bool(is_on), bool(several), neutral


def is_neutral(value: str | bool, neutral: tuple[str | bool, ...]) -> bool:
    """Whether a value of a flag means "as by default", by itself or as one of ``neutral``."""
    if isinstance(value, bool):
        return value in neutral
    return value.lower() in NEUTRAL or any(isinstance(v, str) and _equal(value, v) for v in neutral)


def _equal(a: str, b: str) -> bool:
    try:
        return float(a) == float(b)
    except ValueError:
        return a.lower() == b.lower()
