// Which characters of a text were drafted, and their tint.
//
// The tint is a custom highlight: ranges over the rendered text, so that Markdown and highlighted code keep their form.

// Characters of the model's text in a row that are not shown.
const MOST_HIDDEN = 64;

const registry = globalThis.CSS?.highlights;
const drafted = registry ? new Highlight() : null;
registry?.set("drafted", drafted);

/** Removes the tint of all texts. */
export function clearAll() { drafted?.clear(); }

/** Assigns the pieces of a stream to its text: pieces come as the model wrote them, of which some (tags, blank lines
    around a thought) is not shown. */
export class Pieces {
  constructor() { this.text = ""; this.drafted = []; }

  add(segments) {
    for (const [text, isDraft] of segments) {
      this.text += text;
      for (let i = 0; i < text.length; i++) this.drafted.push(isDraft);
    }
  }

  /** Appends to `runs` ([start, end, …] of drafted characters) those of `text`, which begins at `start`. */
  assign(text, start, runs) {
    let at = 0;
    for (let i = 0; i < text.length; i++) {
      const place = this.text.indexOf(text[i], at);
      if (place < 0 || place - at > MOST_HIDDEN) continue;
      at = place + 1;
      if (!this.drafted[place]) continue;
      if (runs.length && runs.at(-1) === start + i) runs[runs.length - 1] += 1;
      else runs.push(start + i, start + i + 1);
    }
    this.text = this.text.slice(at);
    this.drafted.splice(0, at);
  }
}

/** The tint of one text, given its runs. */
export class Tint {
  constructor(runs) { this.runs = runs; }

  clear(block) {
    for (const range of block.ranges || []) drafted?.delete(range);
    block.ranges = [];
    block.painted = 0;
  }

  /** Tints a rendered block: characters of its text are those of `block.raw`, less the marks of Markdown. */
  paint(block) {
    if (!drafted || !this.runs.length) return;
    if (block.text && !block.isComplete) {
      this.paintGrowing(block);
      return;
    }
    this.clear(block);
    const { raw, offset } = block, walker = document.createTreeWalker(block.body, NodeFilter.SHOW_TEXT, {
      acceptNode: (node) => (node.parentElement.closest("figcaption, math") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT),
    });
    let at = block.text || raw.startsWith("```") ? raw.indexOf("\n") + 1 : 0, run = this.firstRun(offset);
    for (let node; (node = walker.nextNode()); ) {
      const text = node.data;
      let start = -1;
      for (let i = 0; i < text.length; i++) {
        // Blanks between blocks are of the page, not of the text.
        const place = text[i] > " " ? raw.indexOf(text[i], at) : raw[at] === text[i] ? at : -1;
        let isDraft = false;
        if (place >= 0) {
          at = place + 1;
          while (run < this.runs.length && this.runs[run + 1] <= offset + place) run += 2;
          isDraft = run < this.runs.length && this.runs[run] <= offset + place;
        }
        if (isDraft && start < 0) start = i;
        if (!isDraft && start >= 0) { this.add(block, node, start, i); start = -1; }
      }
      if (start >= 0) this.add(block, node, start, text.length);
    }
  }

  /** Code that still grows, and text as it is written, is one text node, a part of the raw text. */
  paintGrowing(block) {
    const begin = block.offset + (block.isPlain ? 0 : block.raw.indexOf("\n") + 1), size = block.text.length;
    const from = block.painted || 0;
    block.ranges ??= [];
    for (let run = this.firstRun(begin + from); run < this.runs.length && this.runs[run] < begin + size; run += 2) {
      this.add(block, block.text, Math.max(this.runs[run] - begin, from), Math.min(this.runs[run + 1] - begin, size));
    }
    block.painted = size;
  }

  /** The place of the first run that ends after `offset`. */
  firstRun(offset) {
    let low = 0, high = this.runs.length / 2;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.runs[2 * middle + 1] <= offset) low = middle + 1;
      else high = middle;
    }
    return 2 * low;
  }

  add(block, node, start, end) {
    if (end <= start) return;
    const range = new StaticRange({ startContainer: node, startOffset: start, endContainer: node, endOffset: end });
    drafted.add(range);
    block.ranges.push(range);
  }
}
