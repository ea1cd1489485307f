"""Wrong arguments of the library: the error is an InputError that names the argument and the form expected."""

import inspect
import re
from dataclasses import fields

import numpy as np
import pytest

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.argument_checks import caller_names, has_type, hints_of
from dflash_jax.frontend.keywords import KEYWORDS, OTHERS, with_other_names
from dflash_jax.frontend.llm_config import LLMConfig
from tests.odd_values import HUGE, ODD, SURROGATE, refusal

VALUES = [
    *("8", "", 5, -1, 1.5, float("nan"), float("inf"), 2**80, True, None, b"x"),
    *(
        [],
        [1],
        [1.5],
        [None],
        ["a"],
        (),
        {},
        {"a": 1},
        {1: "a"},
        set(),
        object(),
        np.float32(2),
        np.array([1.5]),
        print,
    ),
]
PARAMS = {field.name: field for field in fields(SamplingParams)}
CONFIG = {field.name: field for field in fields(LLMConfig)}
OWN_FORM = ("prompts", "prompt", "messages")


@pytest.fixture(scope="module")
def llm():
    return LLM(draft=None, slots=2, max_len=64)


def refused_by_name(call, name: str) -> bool:
    """Whether a call is refused, with an error that names the argument."""
    message = None
    try:
        call()
    except InputError as e:
        message = str(e)
    if message is not None:
        assert re.search(rf"\b{name.replace('_', '[_ ]')}\b", message), (name, message)
        assert "\n" not in message
    return message is not None


@pytest.mark.parametrize("name", PARAMS)
def test_a_sampling_parameter_of_a_wrong_type_is_named(name):
    for value in VALUES:
        is_refused = refused_by_name(lambda value=value: SamplingParams(**{name: value}), name)
        is_right = has_type(value, hints_of(SamplingParams)[name])
        # NumPy's arrays are lists, and None is an empty collection.
        assert is_refused or is_right or value is None or hasattr(value, "tolist")


@pytest.mark.parametrize("name", CONFIG)
def test_a_keyword_of_the_llm_of_a_wrong_type_is_named(name):
    for value in VALUES:
        if not has_type(value, hints_of(LLMConfig)[name]):
            assert refused_by_name(lambda value=value: LLM(**{name: value}), name), value


@pytest.mark.parametrize("name", KEYWORDS)
def test_a_keyword_of_another_server_of_a_wrong_type_is_named(name):
    for value in (object(), b"x", {1, 2}):
        assert refused_by_name(lambda value=value: LLM(**{name: value}), name)


@pytest.mark.parametrize("method", ["generate", "chat", "stream", "pieces", "check"])
def test_an_argument_of_a_method_of_a_wrong_type_is_named(method, llm):
    call = getattr(llm, method)
    hints = hints_of(call)
    names = list(inspect.signature(call).parameters)
    right = {names[0]: "x" if names[0] != "messages" else [{"role": "user", "content": "hi"}]}
    for name in names[1:]:
        for value in VALUES:
            if not has_type(value, hints[name]):
                assert refused_by_name(lambda name=name, value=value: call(**right, **{name: value}), name), (
                    name,
                    value,
                )
    with pytest.raises(InputError, match=rf"{method}\(\) has no argument 'parms': did you mean params\?"):
        call(**right, parms=None)


@pytest.mark.parametrize(
    "wrong", [None, 5, 1.5, True, b"x", object(), {"prmpt": "x"}, [None], [[1.5]], [[True]], [[None]]]
)
def test_a_prompt_of_a_wrong_type_is_named(wrong, llm):
    for call in (llm.generate, llm.check):
        with pytest.raises(InputError, match=r"^prompts(\[0\])? (is|has) .*it must be a string, token ids"):
            call(wrong)
    if not isinstance(wrong, list) or wrong == [None]:
        for call in (llm.stream, llm.pieces, llm.encode):
            with pytest.raises(InputError, match=r"^prompt (is|has) .*it must be a string, token ids"):
                call(wrong)


@pytest.mark.parametrize(
    "wrong", ["hi", None, 5, [], ["hi"], [[]], [{"content": "x"}], [{"role": 1}], [None], {"role": "user"}]
)
def test_messages_of_a_wrong_form_show_the_right_one(wrong, llm):
    with pytest.raises(InputError, match=r'^messages (is|has) .*\{"role": "user", "content": "…"\}'):
        llm.chat(wrong)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SamplingParams(temprature=1), "no argument 'temprature': did you mean temperature"),
        (lambda: LLM(temprature=1), "no argument 'temprature': SamplingParams has temperature"),
        (lambda: LLM(modle="x"), "no argument 'modle': did you mean model"),
        (lambda: LLM(xyzzy=1), "no argument 'xyzzy': docs/api.md and docs/vllm_and_sglang.md list them"),
        (lambda: SamplingParams(xyzzy=1), "no argument 'xyzzy': docs/api.md and docs/vllm_and_sglang.md list them"),
        (lambda: LLM(task="embed"), "task is 'embed': that is refused"),
        (lambda: LLM("a", model="b"), "target and model are one argument"),
        (lambda: LLM(tp_size=1, tensor_parallel_size=1), "tp_size and tensor_parallel_size are one argument"),
        (lambda: LLM(mesh="tensor=1", tensor_parallel_size=1), "mesh and tensor_parallel_size are one argument"),
        (lambda: LLM(slots=4, max_num_seqs=4), "slots and max_num_seqs are one argument"),
        (lambda: SamplingParams(max_tokens=1, max_new_tokens=2), "max_tokens and max_new_tokens are one parameter"),
        (lambda: SamplingParams(temperature=float("nan")), "temperature is nan: it must be 0"),
    ],
)
def test_misspelt_and_double_arguments_are_named(call, message):
    with pytest.raises(InputError, match=re.escape(message)):
        call()


@pytest.mark.parametrize("name", [*CONFIG, *KEYWORDS, *OTHERS, "device_map", "torch_dtype", "queue", "port"])
def test_a_suggested_keyword_is_one_that_the_llm_accepts(name):
    with pytest.raises(InputError) as error:
        with_other_names({f"{name}_": None})
    suggestion = re.search(r"did you mean (\w+)\?", str(error.value))
    if suggestion and suggestion[1] not in CONFIG:
        with_other_names({suggestion[1]: None if KEYWORDS[suggestion[1]][0].const is None else False})
    assert len(str(error.value)) < 160


@pytest.mark.parametrize("name", ["hf_token", "watermark_key"])
def test_no_message_shows_a_secret(name):
    with pytest.raises(InputError, match=f"^{name}: that is refused, ") as error:
        LLM(**{name: "hf_secret"})
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(), "generate() needs prompts"),
        (lambda llm: llm.chat(), "chat() needs messages"),
        (lambda llm: llm.stream(params=None), "stream() needs prompt"),
        (lambda llm: llm.stream("x", None, 1), "stream() has 3 arguments without a keyword: it takes prompt, params"),
        (lambda llm: llm.generate("x", prompts="y"), "generate() has two values for prompts"),
        (lambda llm: SamplingParams(*range(30)), "SamplingParams() has 30 arguments without a keyword: at most 24 are"),
    ],
)
def test_a_call_with_too_few_or_too_many_arguments_names_the_function(call, message, llm):
    with pytest.raises(InputError, match="^" + re.escape(message)):
        call(llm)


def test_numbers_and_arrays_of_numpy_are_token_ids_and_numbers(llm):
    params = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.0), stop_token_ids=np.array([1, 2]))
    assert (params.max_tokens, params.stop_token_ids) == (3, [1, 2])
    ids = [5, 6, 7]
    (expected,) = llm.generate([ids], params)
    for given in (np.array(ids), np.array([ids]), [np.array(ids)], [np.int32(i) for i in ids], tuple(ids)):
        (output,) = llm.generate(given, params)
        assert (output.prompt_ids, output.token_ids) == (ids, expected.token_ids)


@pytest.mark.parametrize("name", PARAMS)
def test_an_odd_value_of_a_sampling_parameter_is_refused_or_runs(name, llm):
    for value in ODD:
        refusal(lambda value=value: llm.generate("def f(", SamplingParams(**{"max_tokens": 2, name: value})))


def configuration(keywords) -> LLMConfig:
    """What `LLM` makes of its keywords, with their names in errors."""
    values, names = with_other_names(keywords)
    with caller_names(names):
        return LLMConfig(**values)


@pytest.mark.parametrize("name", [*CONFIG, *KEYWORDS, *OTHERS])
def test_an_odd_value_of_a_keyword_is_refused_or_read(name):
    for value in ODD:
        message = refusal(lambda value=value: configuration({name: value}))
        assert message is None or message.startswith((name, f"LLM has no argument {name!r}"))


@pytest.mark.parametrize("method", ["generate", "check", "stream", "pieces", "encode", "chat"])
def test_an_odd_prompt_is_refused(method, llm):
    call = getattr(llm, method)
    for value in (*ODD, np.float16(1), [[HUGE]], {"prompt": SURROGATE}, {"prompt_token_ids": [HUGE]}):
        if value != "a\0b":
            assert refusal(lambda value=value: call(value)), value


@pytest.mark.parametrize(
    "message",
    [{"role": "user", "content": SURROGATE}, {"role": SURROGATE, "content": "x"}, {"role": "user", "content": HUGE}],
    ids=["content", "role", "number"],
)
def test_an_odd_message_is_refused_or_answered(message, llm):
    params = SamplingParams(max_tokens=1)
    assert (message["content"] == HUGE) or refusal(lambda: llm.chat([message], params))
    for name in ("chat_template", "chat_template_kwargs", "tools"):
        for value in (*ODD, {5: 1}):
            refusal(
                lambda name=name, value=value: llm.chat([{"role": "user", "content": "x"}], params, **{name: value})
            )
