"""A chat template in place of the tokenizer's: a file, or the template itself."""

import os
import re
from pathlib import Path
from typing import Any

import jinja2.sandbox

from dflash_jax.argument_checks import shown, wrong
from dflash_jax.errors import InputError
from dflash_jax.frontend.tokenizer import RESERVED

# The longest published template has 20 thousand.
MAX_CHARACTERS = 2**20
# transformers' tag for answers, used in training.
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def read_chat_template(given: str) -> str:
    """Reads a chat template.

    Args:
        given: A path, or the template itself.

    Returns:
        The text of the template.

    Raises:
        InputError: ``given`` is neither a file nor a template, has more than 2**20 characters, or does not parse.
    """
    is_text = any(c in given for c in "{}\n")
    path = Path(given).expanduser() if not is_text else None
    where = "the chat template" if path is None else f"chat template {shown(given)}"
    text = given
    if path is not None:
        if not os.path.isfile(path):
            raise InputError(f"{where} is neither a file nor a Jinja template")
        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(MAX_CHARACTERS + 1)
        except UnicodeDecodeError:
            raise InputError(f"{where} is not UTF-8 text") from None
        except (OSError, ValueError) as e:
            raise InputError(f"{where} cannot be read: {getattr(e, 'strerror', None) or e}") from None
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"{where} has more than {MAX_CHARACTERS} characters")
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        environment.parse(GENERATION.sub("", text))
    except (jinja2.TemplateError, RecursionError) as e:
        raise InputError(f"{where} is not a Jinja template: {str(e)[:200] or type(e).__name__}") from None
    return text


def template_options(
    chat_template: str | None, chat_template_kwargs: dict | None, continue_final_message: bool
) -> dict[str, Any]:
    """The options of `Tokenizer.render_chat` that a call gives. Raises InputError for a reserved name."""
    options: dict[str, Any] = dict(chat_template_kwargs or {})
    if not all(isinstance(name, str) for name in options):
        raise wrong("chat_template_kwargs", options, "a dict whose keys are strings")
    if reserved := RESERVED & set(options):
        raise InputError(f"chat_template_kwargs has {min(reserved)!r}, which is not an option of a chat template")
    if chat_template is not None:
        options["chat_template"] = read_chat_template(chat_template)
    if continue_final_message:
        options["continue_final_message"] = True
    return options
