"""Writes docs/drafted.svg: what `dflash demo` prints, as a terminal shows it, with the figures of this machine.

python scripts/pages/drafted_text.py
"""

import argparse
import os
import re
import subprocess
import sys
from html import escape
from pathlib import Path

PICTURE = Path(__file__).parents[2] / "docs" / "drafted.svg"
# Of a monospaced font of 14 px.
COLUMN, LINE, MARGIN, COLUMNS = 8.43, 20, 16, 108
GREY, WHITE, GREEN, BLACK = "#8b949e", "#e6edf3", "#56d364", "#0d1117"


def wrapped(parts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The parts, with the end of a line wherever a terminal of `COLUMNS` would break it between words."""
    result, column = [], 0
    for text, colour in parts:
        for piece in re.findall(r"\n|[^\S\n]*[^\s]+|[^\S\n]+", text):
            if piece == "\n":
                column = 0
            elif column + len(piece) > COLUMNS:
                piece = "\n" + piece.lstrip()
                column = len(piece) - 1
            else:
                column += len(piece)
            if result and result[-1][1] == colour:
                piece = result.pop()[0] + piece
            result.append((piece, colour))
    return result


def demo() -> list[tuple[str, str]]:
    """(text, colour) in order."""
    variables = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"FORCE_COLOR": "1"}
    command = [sys.executable, "-m", "dflash_jax", "demo"]
    output = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True).stdout
    colours = {"32": GREEN, "0": WHITE}
    parts, colour = [("$ dflash demo\n", GREY)], WHITE
    for piece in re.split(r"(\033\[\d+m)", output.rstrip("\n")):
        if match := re.fullmatch(r"\033\[(\d+)m", piece):
            colour = colours[match[1]]
        elif piece:
            parts.append((piece, colour))
    return wrapped(parts)


def svg(parts: list[tuple[str, str]]) -> str:
    texts, row, column = [], 0, 0
    for text, colour in parts:
        for i, line in enumerate(text.split("\n")):
            if i:
                row, column = row + 1, 0
            if line.strip():
                x, y = MARGIN + column * COLUMN, MARGIN + (row + 0.8) * LINE
                texts.append(
                    f'<text x="{x:.1f}" y="{y:.0f}" fill="{colour}" xml:space="preserve">{escape(line)}</text>'
                )
            column += len(line)
    width, height = 2 * MARGIN + COLUMNS * COLUMN, 2 * MARGIN + (row + 1) * LINE
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-size="14"',
            ' font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace">',
            f'<rect width="100%" height="100%" rx="8" fill="{BLACK}"/>',
            *texts,
            "</svg>\n",
        )
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PICTURE.write_text(svg(demo()), encoding="utf-8")
