"""A system's TOML: target, drafter, lengths, sampling, and the mesh that suits a machine."""

from dataclasses import dataclass
from pathlib import Path

from dflash_jax.argument_checks import suggestion
from dflash_jax.checkpoint.config_files import CONFIGS, find_config, read_toml_file
from dflash_jax.errors import InputError
from dflash_jax.parallel.devices import check_meshes, mesh_for

OPTIONS = {
    "target": str,
    "draft": (str, list),
    "dtype": str,
    "quantize": str,
    "block_size": (int, str),
    "max_len": int,
    "draft_window_size": int,
    "draft_sink_size": int,
    "draft_tokens": str,
    "decode_context_parallel_size": int,
    "hf_overrides": dict,
}
SAMPLING = {
    "temperature": (int, float),
    "top_k": int,
    "top_p": (int, float),
    "min_p": (int, float),
    "repetition_penalty": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
}


@dataclass(frozen=True)
class System:
    """A system, as its TOML describes it.

    Attributes:
        options: Defaults of command-line options, by their names.
        meshes: Mesh by machine, such as "b200x8".
        shapes: ``config.json`` files of "target" and "draft", for what needs no weights.
    """

    options: dict
    meshes: dict[str, str]
    shapes: dict[str, Path]

    def mesh(self, kind: str, count: int) -> str:
        """For ``count`` devices of a JAX device_kind."""
        return mesh_for(self.meshes, kind, count)


def _check(table: dict, known: dict, where: str) -> dict:
    for key, value in table.items():
        if key not in known:
            raise InputError(f"{where}: {key!r} is not known: {suggestion(key, known)}")
        if isinstance(value, bool) or not isinstance(value, known[key]):
            raise InputError(f"{where}: {key} is {value!r}: its type is wrong")
    return table


def read_system(name: str | Path) -> System:
    """A system by the path of its TOML or by the name of one of configs/ (`find_config`).

    Raises:
        InputError: The file does not exist, is not TOML, or has unknown keys.
    """
    path = find_config(name)
    raw = read_toml_file(path)
    tables = {name: raw.pop(name, {}) for name in ("sampling", "mesh", "shapes")}
    if not all(isinstance(table, dict) for table in tables.values()):
        raise InputError(f"config {path}: sampling, mesh and shapes must be tables")
    options = _check(raw, OPTIONS, f"config {path}") | _check(tables["sampling"], SAMPLING, f"config {path}: sampling")
    check_meshes(tables["mesh"], f"config {path}")
    shapes = _check(tables["shapes"], {"target": str, "draft": str}, f"config {path}: shapes")
    return System(options, tables["mesh"], {k: path.parent / v for k, v in shapes.items()})


def system_of(repo: str, kind: str = "target") -> System | None:
    """The package's system whose target, or drafter, is a Hugging Face repository; None where there is none.

    Args:
        repo: The repository id, in any case, as huggingface.co takes it.
        kind: "target" or "draft".
    """
    systems = map(read_system, sorted(CONFIGS.glob("*.toml")))
    return next((s for s in systems if str(s.options[kind]).lower() == repo.lower()), None)


def repositories(kind: str) -> list[str]:
    """The repository ids of the package's targets ("target") or drafters ("draft")."""
    return sorted({str(read_system(path).options[kind]) for path in CONFIGS.glob("*.toml")} - {"mtp"})
