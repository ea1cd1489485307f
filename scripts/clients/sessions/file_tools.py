"""The tools of the Python loops."""

import subprocess
from pathlib import Path


def read_file(path: str) -> str:
    """Reads a file."""
    return Path(path).read_text()


def edit_file(path: str, old: str, new: str) -> str:
    """Replaces a text of a file."""
    Path(path).write_text(Path(path).read_text().replace(old, new))
    return "done"


def run_command(command: str) -> str:
    """Runs a command."""
    ended = subprocess.run(command, shell=True, capture_output=True, text=True)
    return f"exit code {ended.returncode}\n{ended.stdout}{ended.stderr}"


TOOLS = [read_file, edit_file, run_command]
