"""Sampling defaults and stop ids of a checkpoint."""

import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from dflash_jax.argument_checks import check_type, plain, shown
from dflash_jax.checkpoint.config_files import parsed, read_json, read_raw
from dflash_jax.errors import InputError
from dflash_jax.models.families.reading import LIMITS, Raw, integer
from dflash_jax.sampling_params import LOGPROBS_MODES, MAX_STOPS, SamplingParams


def _stop_ids(raw: dict) -> tuple[int, ...] | None:
    """``eos_token_id`` of a config, one id or several; None where it is missing."""
    value = raw.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if len(ids) > MAX_STOPS:
        raise InputError(f"eos_token_id is {shown(value)}: at most {MAX_STOPS} are possible")
    return tuple(integer("eos_token_id", i, 0, LIMITS["vocab_size"]) for i in ids)


def _sampling(raw: Raw) -> dict:
    """The sampling options of a generation_config.json."""
    values = {"repetition_penalty": raw.number("repetition_penalty", None, 1e-6, 1e6)}
    if raw.flag("do_sample"):
        values |= {
            "temperature": raw.number("temperature", 1.0, 0.0, 1e6),
            "top_k": raw.integer("top_k", None, minimum=0),
            "top_p": raw.number("top_p", None, 0.0, 1.0),
            "min_p": raw.number("min_p", None, 0.0, 1.0),
        }
    values = {name: value for name, value in values.items() if value is not None}
    SamplingParams(**values)
    return values


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling defaults and stop ids of a checkpoint.

    Attributes:
        values: Sampling options by the names of `SamplingParams`.
        stop_ids: Token ids that end a text.
        logprobs_mode: The `LLM`'s; None where it has none.
    """

    values: dict = field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()
    logprobs_mode: str | None = None

    @classmethod
    def read(
        cls, directory: Path, generation_config: str | Path = "auto", overrides: dict | None = None
    ) -> "SamplingDefaults":
        """From generation_config.json, and the stop ids from config.json where that has none.

        Args:
            directory: Of the checkpoint.
            generation_config: "auto" for the checkpoint's own, "vllm" for none, else the path of another file or of
                its directory.
            overrides: Values in place of those of config.json.
        """
        path = directory / "generation_config.json"
        if generation_config not in ("auto", "vllm"):
            path = Path(generation_config).expanduser()
            path = path / "generation_config.json" if os.path.isdir(path) else path
        is_read = generation_config != "vllm" and (generation_config != "auto" or path.exists())
        raw = Raw(read_json(path) if is_read else {}, "generation_config")
        values, stop_ids = parsed(_sampling, raw, path), parsed(_stop_ids, raw, path)
        if stop_ids is None:
            config = read_raw(directory, overrides)
            texts = (config, config.get("text_config", {}))
            stop_ids = next((ids for t in texts if (ids := parsed(_stop_ids, t, directory)) is not None), ())
        return cls(values, stop_ids)

    def overridden(self, values: dict) -> "SamplingDefaults":
        """Overrides sampling defaults.

        Args:
            values: By name: temperature, top_k, top_p, min_p, repetition_penalty.

        Raises:
            InputError: Another name, or a wrong value.
        """
        known = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        values = {name: plain(value) for name, value in values.items()}
        for name, value in values.items():
            if name not in known:
                raise InputError(f"sampling default {shown(name)}: it must be one of {', '.join(known)}")
            check_type(f"sampling default {name}", value, float)
        values = values | ({"top_k": 0} if values.get("top_k") == -1 else {})
        SamplingParams(**values)
        return replace(self, values=self.values | values)

    def fill(self, params: SamplingParams) -> SamplingParams:
        """``params`` with every None among the sampling options replaced by its default."""
        neutral = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        neutral["logprobs_mode"] = self.logprobs_mode or LOGPROBS_MODES[0]
        missing = {f.name for f in fields(params) if getattr(params, f.name) is None}
        filled = replace(params, **{k: v for k, v in (neutral | self.values).items() if k in missing})
        # Logits divided by a smaller temperature would overflow; the limit of sampling is greedy.
        return replace(filled, temperature=0.0) if (filled.temperature or 0.0) < 1e-5 else filled

    def stops(self, params: SamplingParams, must_end: bool = False) -> list[int]:
        """The token ids that end a text; ``must_end``: with the checkpoint's own even where ignore_eos is set."""
        checkpoint = () if params.ignore_eos and not must_end else self.stop_ids
        return list(dict.fromkeys((*params.stop_token_ids, *checkpoint)))
