"""Fields of OpenAI, vLLM and SGLang that requests may have although they have no effect here.

A table maps a field's name to its allowed values beside null: values without effect in the other servers, or types
where no value changes the text. `schema_base.Body` removes such fields from a request before it is validated, and
refuses other values by name. A field that has an effect is a field of a schema, and in no table.
"""

import json
from collections.abc import Mapping
from typing import Any

Table = Mapping[str, tuple]

NULL, FALSE, TRUE, BOOL, TEXT, NUMBER, OBJECT = (), (False,), (True,), (bool,), (str,), (int, float), (dict,)
ZERO, ONE, NO_ITEMS, NO_KEYS, NO_TEXT = (0,), (1,), ([],), ({},), ("",)

# Routing between servers, logging and caching: this is one server, and it does not log prompts.
_ROUTING: Table = {
    "bootstrap_host": NULL,
    "bootstrap_port": NULL,
    "bootstrap_room": NULL,
    "custom_labels": OBJECT,
    "data_parallel_rank": ZERO,
    "disagg_prefill_dp_rank": NULL,
    "extra_key": NO_TEXT,
    "kv_transfer_params": NO_KEYS,
    "ec_transfer_params": NO_KEYS,
    "ngram_corpus_id": NULL,
    "routed_dp_rank": ZERO,
    "session_id": TEXT,
    "session_params": NO_KEYS,
}
# Extensions whose values would need weights, code or data of the client.
_EXTENSIONS: Table = {
    "custom_logit_processor": NULL,
    "custom_params": NO_KEYS,
    "images_config": NO_KEYS,
    "lora_path": NULL,
    "max_dynamic_patch": NULL,
    "min_dynamic_patch": NULL,
    "mm_processor_kwargs": NO_KEYS,
    "use_audio_in_video": FALSE,
    "vllm_xargs": NO_KEYS,
}
_STREAMING: Table = {"stream_interval": (int,)}
_INTERNALS: Table = {
    "return_hidden_states": FALSE,
    "return_routed_experts": FALSE,
    "routed_experts_prompt_start": ZERO,
    "routed_experts_start_len": ZERO,
}
_OPENAI: Table = {
    "metadata": OBJECT,
    "prompt_cache_key": TEXT,
    "prompt_cache_retention": TEXT,
    "safety_identifier": TEXT,
    "service_tier": TEXT,
    "user": TEXT,
}
_GENERATION: Table = {
    **_ROUTING,
    **_EXTENSIONS,
    **_INTERNALS,
    **_STREAMING,
    "early_stopping": FALSE,
    "guided_decoding_backend": TEXT,
    "guided_whitespace_pattern": NULL,
    "json_schema": NULL,
    "length_penalty": ONE,
    "repetition_detection": NULL,
    "return_cached_tokens_details": FALSE,
    "return_mm_kwargs": BOOL,
    "return_token_offsets": FALSE,
    "sampling_seed": NULL,
    "structural_tag": NULL,
    "use_beam_search": FALSE,
    "user": TEXT,
    "watermarking": FALSE,
}

CHAT: Table = {
    **_GENERATION,
    **_OPENAI,
    "add_special_tokens": FALSE,
    "audio": NULL,
    "documents": NO_ITEMS,
    # OpenAI's older form of tool_choice and tools.
    "function_call": ("none", "auto"),
    "functions": NO_ITEMS,
    "input_ids": NULL,
    "media_io_kwargs": NO_KEYS,
    "modalities": (["text"],),
    # A prediction of the text only makes other servers faster.
    "prediction": OBJECT,
    "return_meta_info": FALSE,
    "return_prompt_text": FALSE,
    "store": BOOL,
    "task": NULL,
    "verbosity": (str, int),
    "web_search_options": NULL,
}
COMPLETION: Table = {
    **_GENERATION,
    **_OPENAI,
    "add_special_tokens": TRUE,
    "best_of": ONE,
    "prompt_embeds": NULL,
    "suffix": NO_TEXT,
}
RESPONSES: Table = {
    **_ROUTING,
    **_EXTENSIONS,
    **_STREAMING,
    **{name: types for name, types in _OPENAI.items() if name not in ("metadata", "user")},
    "background": FALSE,
    "context_management": NO_ITEMS,
    "conversation": NULL,
    "enable_response_messages": FALSE,
    # A limit for OpenAI's built-in tools.
    "max_tool_calls": (int,),
    "previous_input_messages": NULL,
    "previous_response": NULL,
    "prompt": NULL,
    "stream_options": OBJECT,
}
# Anthropic's fields. Prefixes are always cached, and there is one speed.
MESSAGES: Table = {
    "cache_control": OBJECT,
    "container": NULL,
    "inference_geo": TEXT,
    "mcp_servers": NO_ITEMS,
    "metadata": OBJECT,
    "service_tier": TEXT,
    "speed": ("standard",),
    "user_profile_id": TEXT,
    "workspace_id": TEXT,
}
SAMPLING: Table = {
    **_STREAMING,
    "beam_width": ONE,
    "custom_params": NO_KEYS,
}
GENERATE: Table = {
    **_ROUTING,
    **_EXTENSIONS,
    **_INTERNALS,
    "audio_data": NO_ITEMS,
    "background": FALSE,
    "bootstrap_pair_key": NULL,
    "conversation_id": TEXT,
    "decode_tp_size": NULL,
    "encoder_urls": NO_ITEMS,
    "external_trace_header": OBJECT,
    "http_worker_ipc": NULL,
    "image_max_dynamic_patch": NULL,
    "input_embeds": NULL,
    "kv_router_hint": NULL,
    "log_metrics": BOOL,
    "lora_id": NULL,
    "mm_content_hashes": NO_ITEMS,
    "mm_hashes": NO_ITEMS,
    "modalities": ([], ["text"], ["image"], ["multi-images"], ["video"]),
    # Routers set a model name.
    "model": TEXT,
    "multi_item_delimiter_indices": NULL,
    "need_wait_for_mm_inputs": FALSE,
    "no_logs": BOOL,
    "num_items_assigned": NULL,
    "parameters": NULL,
    "positional_embed_overrides": NULL,
    "prompt": NULL,
    "received_time": NUMBER,
    "return_bytes": FALSE,
    "return_entropy": FALSE,
    "return_flat_raw_top_logprobs": FALSE,
    "return_flat_raw_top_logprobs_b64": FALSE,
    "return_indexer_topk": FALSE,
    "return_prompt_token_ids": FALSE,
    "return_sampling_mask": FALSE,
    "routing_key": TEXT,
    "video_config": NO_KEYS,
    "video_max_dynamic_patch": NULL,
}
TOKENIZE: Table = {"mm_processor_kwargs": NO_KEYS, "media_io_kwargs": NO_KEYS, "tool_choice": TEXT}
DETOKENIZE: Table = {"skip_special_tokens": TRUE}
# Fields of a message.
MESSAGE: Table = {"audio": NULL, "function_call": NULL, "tools": NO_ITEMS}

# Reasons for refusing a field where the allowed values do not explain it.
_REASONS = {"custom_logit_processor": "is refused: it is a pickled program, and the server runs no code of its clients"}
_NAMES = {bool: "true or false", str: "a string", int: "a whole number", float: "a number", dict: "an object"}


def _is(value: Any, allowed: Any) -> bool:
    if isinstance(allowed, type):
        return type(value) is allowed
    # 1.0 equals 1, but True does not.
    is_alike = isinstance(value, bool) == isinstance(allowed, bool)
    return is_alike and value == allowed


def accepts(allowed: tuple, value: Any) -> bool:
    """Whether a field may have this value."""
    return value is None or any(_is(value, each) for each in allowed)


def reason(name: str, allowed: tuple) -> str:
    """Why a value that is not ``allowed`` is refused; follows the field's ``name`` in a message."""
    if name in _REASONS:
        return _REASONS[name]
    if allowed and all(isinstance(each, type) for each in allowed):
        return f"must be {' or '.join(_NAMES[each] for each in allowed)}"
    values = " or ".join(json.dumps(each) for each in allowed or (None,))
    return f"is not supported: only {values} is possible"
