"""Writes docs/drafted.svg: the text that the bundled pair gives, with accepted drafts in green, as a terminal shows it.

python scripts/pages/drafted_text.py
"""

import argparse
from html import escape
from pathlib import Path

from dflash_jax import LLM, Completion, SamplingParams
from dflash_jax.frontend.sequence import Piece

PICTURE = Path(__file__).parents[2] / "docs" / "drafted.svg"
PROMPT = "def read_config(path):"
COMMAND = f'$ dflash generate --prompt "{PROMPT}" --temperature 0.7 --seed 5 --block-size 8 --show-drafts'
PARAMS = SamplingParams(temperature=0.7, seed=5, max_tokens=160)
# Of a monospaced font of 14 px.
COLUMN, LINE, MARGIN, COLUMNS = 8.43, 20, 16, 108
GREY, WHITE, GREEN, BLACK = "#8b949e", "#e6edf3", "#56d364", "#0d1117"


def segments() -> tuple[list[tuple[str, str]], float]:
    """(text, colour) in order, and the mean acceptance length."""
    *pieces, completion = LLM(block_size=8).pieces(PROMPT, PARAMS)
    assert isinstance(completion, Completion)
    parts = [(COMMAND + "\n", GREY), (PROMPT, WHITE)]
    for piece in pieces:
        if isinstance(piece, Piece):
            parts += [(text, GREEN if is_draft else WHITE) for text, is_draft in piece.segments]
    return parts, completion.mean_acceptance_length


def svg(parts: list[tuple[str, str]], note: str) -> str:
    texts, row, column = [], 0, 0
    for text, colour in [*parts, (f"\n\n{note}", GREY)]:
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
    drawn, length = segments()
    note = f"green: accepted drafts; white: the target's own tokens; {length:.2f} tokens a round"
    PICTURE.write_text(svg(drawn, note), encoding="utf-8")
