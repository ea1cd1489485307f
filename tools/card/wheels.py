"""Carried wheels, installed for `scripts/card/check.py` alone."""

import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

# Seconds to install one wheel.
PIP_S = 120
# Messages of pip about a wheel that is not for this Python or machine.
UNSUITABLE = ("not a supported wheel", "No matching distribution found")


def install(wheels: Path) -> tuple[str, dict[str, str]]:
    """Installs the wheels of a folder into a directory of their own, once for all commands.

    Returns:
        The directory, and pip's last message for each wheel that it did not install, by name.

    Raises:
        ValueError: There are no wheels, or no pip.
    """
    names = sorted({path.name.split("-")[0] for path in wheels.glob("*.whl")})
    if not names:
        raise ValueError(f"{wheels} has no wheels")
    if importlib.util.find_spec("pip") is None:
        raise ValueError(f"--wheels needs pip, which {sys.executable} does not have")
    key = hashlib.sha256(repr((sys.version, sorted(p.name for p in wheels.glob("*.whl")))).encode()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"card_check-{key}"
    known = target / "refused.json"
    if known.exists():
        return str(target), json.loads(known.read_text())
    refused = {}
    for name in names:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--find-links"]
        command += [str(wheels), "--target", str(target), name]
        try:
            pip = subprocess.run(command, capture_output=True, text=True, timeout=PIP_S)
        except subprocess.TimeoutExpired:
            refused[name] = f"pip took more than {PIP_S} s"
            continue
        if pip.returncode:
            refused[name] = (pip.stderr.strip().splitlines() or [f"pip ended with code {pip.returncode}"])[-1][:300]
    target.mkdir(exist_ok=True)
    # Any other failure may succeed the next time.
    if all(any(text in why for text in UNSUITABLE) for why in refused.values()):
        known.write_text(json.dumps(refused))
    return str(target), refused
