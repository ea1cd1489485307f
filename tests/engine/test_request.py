"""What a request may ask for."""

import pytest

from dflash_jax.engine.request import RequestLimits
from dflash_jax.errors import InputError
from dflash_jax.sampling_params import SamplingParams

LIMITS = RequestLimits(positions=100, block_size=16)
GOOD = {"prompt": [1] * 60, "params": SamplingParams(max_tokens=40), "block_size": 16, "stops": range(16)}


def check(**changes) -> None:
    LIMITS.check(**GOOD | changes)


def test_a_request_at_every_limit_is_allowed():
    check(params=SamplingParams(max_tokens=40, logprobs=20, prompt_logprobs=20))
    check(prompt=[1] * 100, params=SamplingParams(max_tokens=0))
    check(block_size="auto")
    check(block_size=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "a prompt is empty: it must have at least one token"),
        ({"prompt": [1] * 61}, "61 prompt tokens and 40 new ones are 101: at most 100 fit"),
        ({"params": SamplingParams(max_tokens=None)}, "max_tokens is None: it must be a whole number"),
        (
            {"params": SamplingParams(max_tokens=10**5000)},
            "60 prompt tokens and an integer of 16610 bits new ones are an",
        ),
        ({"block_size": 10**5000}, "block size an integer of 16610 bits: it must be 1 to 16"),
        (
            {"params": SamplingParams(prompt_logprobs=10**5000, max_tokens=1)},
            "prompt_logprobs is an integer of 16610 bits: it must be at most 20",
        ),
        ({"block_size": 17}, r"block size 17: it must be 1 to 16 \(the drafter's own\), or auto"),
        ({"block_size": 0}, "block size 0: it must be 1 to 16"),
        ({"block_size": "wide"}, "block size wide: it must be 1 to 16"),
        ({"stops": range(17)}, "stop_token_ids and the checkpoint's own are 17: at most 16 are possible"),
        ({"params": SamplingParams(max_tokens=40, logprobs=21)}, "^logprobs is 21: it must be at most 20"),
        ({"params": SamplingParams(prompt_logprobs=21, max_tokens=1)}, "^prompt_logprobs is 21: it must be at most 20"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_exceeds_a_limit_is_refused_by_its_name(changes, message):
    with pytest.raises(InputError, match=message):
        check(**changes)


def test_without_a_drafter_only_plain_decoding_is_possible():
    with pytest.raises(InputError, match=r"block size 2: it must be 1 to 1 \(there is no drafter\), or auto"):
        RequestLimits(100, 1).check_block_size(2)
