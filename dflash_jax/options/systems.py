"""A system's TOML: options of models and sampling, and the mesh that suits a machine."""

import argparse
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_jax.argument_checks import check_type, hints_of, shown, suggestion
from dflash_jax.checkpoint.config_files import CONFIGS, find_config, read_toml_file
from dflash_jax.errors import InputError
from dflash_jax.options.option import options_of
from dflash_jax.options.parser import Parser
from dflash_jax.options.shared import LLMOptions, SamplingOptions
from dflash_jax.parallel.devices import check_meshes, mesh_for

# Keys of the table [sampling], and of the file; the table [mesh] has meshes by machine.
SAMPLING = hints_of(SamplingOptions)
FLAGS = {name: each.annotation for name, each in options_of(LLMOptions).items() if each.flag is not None}
OPTIONS = {name: annotation for name, annotation in FLAGS.items() if name != "mesh"}


@dataclass(frozen=True)
class System:
    """A system, as its TOML describes it.

    Attributes:
        options: Defaults of command-line options, by their names.
        meshes: Mesh by machine, such as "b200x8".
        shapes: ``config.json`` files of "target" and "draft", for what needs no weights.
        others: Repositories of other published drafters of the target, each with such a file; None where there is none.
    """

    options: dict
    meshes: dict[str, str]
    shapes: dict[str, Path]
    others: dict[str, Path | None] = field(default_factory=dict)

    def mesh(self, kind: str, count: int) -> str:
        """For ``count`` devices of a JAX device_kind."""
        return mesh_for(self.meshes, kind, count)

    def repositories(self, kind: str) -> dict[str, Path | None]:
        """Its repositories of a kind, "target" or "draft", each with its config's file, if any; its own one first."""
        return {str(self.options[kind]): self.shapes.get(kind)} | (self.others if kind == "draft" else {})


def _check(table: dict, known: dict[str, Any], where: str) -> dict:
    for key, value in table.items():
        if key not in known:
            raise InputError(f"{where}: {key!r} is not known: {suggestion(key, known)}")
        check_type(f"{where}: {key}", value, known[key])
    return table


def read_system(name: str | Path) -> System:
    """A system by the path of its TOML or by the name of one of configs/ (`find_config`).

    Raises:
        InputError: The file does not exist, is not TOML, or has unknown keys.
    """
    path = find_config(name)
    raw = read_toml_file(path)
    tables = {name: raw.pop(name, {}) for name in ("sampling", "mesh", "shapes", "drafters")}
    if not all(isinstance(table, dict) for table in tables.values()):
        raise InputError(f"config {path}: sampling, mesh, shapes and drafters must be tables")
    options = _check(raw, OPTIONS, f"config {path}") | _check(tables["sampling"], SAMPLING, f"config {path}: sampling")
    check_meshes(tables["mesh"], f"config {path}")
    shapes = _check(tables["shapes"], {"target": str, "draft": str}, f"config {path}: shapes")
    others = _check(tables["drafters"], dict.fromkeys(tables["drafters"], str), f"config {path}: drafters")
    files = {k: path.parent / v for k, v in shapes.items()}
    return System(options, tables["mesh"], files, {k: path.parent / v if v else None for k, v in others.items()})


def systems() -> list[System]:
    """The package's systems."""
    return [read_system(path) for path in sorted(CONFIGS.glob("*.toml"))]


def system_of(repo: str) -> System | None:
    """The package's system whose target is a Hugging Face repository; None where there is none.

    Args:
        repo: The repository id, in any case, as huggingface.co takes it.
    """
    return next((s for s in systems() if str(s.options["target"]).lower() == repo.lower()), None)


def repositories(kind: str) -> dict[str, Path | None]:
    """The repository ids of the package's targets ("target") or drafters ("draft"), each with its config's file."""
    found: dict[str, Path | None] = {}
    for system in systems():
        found |= {name: path for name, path in system.repositories(kind).items() if name != "mtp"}
    return dict(sorted(found.items()))


def with_config(parser: Parser, argv: list[str] | None, names: Container[str] | None = None):
    """Parsed arguments, defaults taken from ``--config``; and the `System`, or None.

    Args:
        parser: Has ``--config``.
        argv: The words; None for those of the process.
        names: The options whose defaults are taken; None: all that the parser has.
    """
    # Other names of options have their meaning with the config's defaults.
    config = parser.parse_known_args(argv)[0].config
    if config is None:
        return parser.parse_args(argv), None
    system, names = read_system(config), parser.options if names is None else names
    defaults = {name: value for name, value in system.options.items() if name in names}
    for name, value in defaults.items():
        option = parser.options.get(name)
        if option is not None and not option.is_good(value):
            raise InputError(f"config {config}: {name} is {shown(value)}: it must be {option.right}")
    parser.set_defaults(**defaults)
    return parser.parse_args(argv), system


def llm_keywords(args: argparse.Namespace, system: System | None) -> dict[str, Any]:
    """The keywords of `LLM` that the arguments of a command give; the mesh without --mesh is the config's for here."""
    given = {name: getattr(args, name) for name in FLAGS} | {"mesh": args.mesh or ""}
    if args.mesh is None and system is not None:
        import jax

        given["mesh"] = system.mesh(jax.devices()[0].device_kind, jax.device_count())
    return given | {"draft": None if args.draft == "none" else args.draft}
