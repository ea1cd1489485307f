"""SGLang's kits as test cases against a server of ours. Collected by pytest, which `others_tests.py` starts."""

import importlib
import unittest

import openai
from others_plugin import FROM_PRETRAINED, KEY, NAMES, PLAIN, TARGET, Server, tokenizer_of_target

# Module and class of each kit that a server alone can answer, with what its host class sets.
KITS = {
    ("abort_timeout_kit", "AbortAllMixin"): {"abort_all_max_new_tokens": 8000},
    ("anthropic_messages_kit", "AnthropicMessagesMixin"): {},
    ("basic_api_contract_kit", "BasicAPIContractMixin"): {},
    ("basic_decode_correctness_kit", "BasicDecodeCorrectnessMixin"): {},
    ("basic_scheduler_stress_kit", "BasicSchedulerStressMixin"): {},
    ("ebnf_constrained_kit", "EBNFConstrainedMixin"): {},
    ("json_constrained_kit", "JSONConstrainedMixin"): {},
    ("json_mode_kit", "JSONModeMixin"): {},
    ("matched_stop_kit", "MatchedStopMixin"): {},
    ("reasoning_kit", "ReasoningTokenUsageMixin"): {"options": (), "reasoning_parser_name": "qwen3"},
    ("reasoning_kit", "SeparateReasoningMixin"): {"options": ()},
    ("regex_constrained_kit", "RegexConstrainedMixin"): {},
    ("spec_server_kits", "SpecCorrectnessKit"): {"acc_length_thres": 1.0, "batch_accept_len_thres": 1.0},
    ("spec_server_kits", "SpecFeatureKit"): {},
    ("spec_server_kits", "SpecGrammarKit"): {},
    ("spec_server_kits", "SpecHiddenStatesKit"): {},
    ("spec_server_kits", "SpecLogprobKit"): {},
    ("spec_server_kits", "SpecPenaltyKit"): {},
    ("spec_server_kits", "SpecSamplingMaskKit"): {},
}
FIXTURE = importlib.import_module("sglang.test.server_fixtures.spec_eagle_fixture")
# The requests that some kits send through their fixture.
REQUESTS = next(c for c in vars(FIXTURE).values() if isinstance(c, type) and "run_decode" in vars(c))


class Host(unittest.TestCase):
    """What SGLang's fixtures give to a kit."""

    options = PLAIN
    send_request, send_requests_abort = REQUESTS.send_request, REQUESTS.send_requests_abort
    run_decode = REQUESTS.run_decode

    @classmethod
    def setUpClass(cls) -> None:
        server = Server.get(cls.options)
        cls.base_url, cls.process, cls.model, cls.api_key = server.url, server.process, NAMES[0], KEY
        cls.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        cls.tokenizer = tokenizer_of_target() if cls.options else FROM_PRETRAINED(TARGET)
        cls.think_end_token_id = cls.tokenizer.convert_tokens_to_ids("</think>")


for (module, name), values in KITS.items():
    kit = getattr(importlib.import_module(f"sglang.test.kits.{module}"), name)
    globals()[name] = type(name, (kit, Host), {**values, "__module__": __name__})
del kit, Host
