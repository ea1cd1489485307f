// Markdown of an untrusted author, rendered as it arrives.
//
// HTML in the text is text. What Markdown becomes passes DOMPurify with a list of allowed tags, and nothing in it loads
// anything: an image is a link. Only the last blocks of a text are parsed again when it grows.

import { Marked } from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";

// Characters of a block that are parsed; a longer block is shown as it is written. Parsing takes at most 0.1 s.
const MOST_PARSED = 16_000, MOST_TABLE = 48_000, MOST_HIGHLIGHTED = 15_000;
// Showing highlighted Swift takes a time that grows faster than its length: 15,000 characters of "a<" took 7 s.
const MOST_SWIFT = 4_000;
// Characters and blocks of a text that are parsed; what follows is shown as it is written. A block takes 0.1 ms.
const MOST_RENDERED = 250_000, MOST_BLOCKS = 5_000;
// Blocks at the end of a growing text that further text may still change.
const LIVE_BLOCKS = 2;

// Mathematics: \(…\), \[…\], $…$ and $$…$$, without a blank line, of at most 2,000 characters. A dollar before a blank
// opens nothing, and one after a blank or before a digit closes nothing: they are prices.
const INLINE_MATH = new RegExp([
  /\\\(([^]{1,2000}?)\\\)/, /\\\[([^]{1,2000}?)\\\]/, /\$\$([^$]{1,2000}?)\$\$/,
  /\$(?![\s$])((?:\\[^]|[^\\$\n]){1,300}?)(?<!\s)\$(?![\d$])/,
].map((form) => `^${form.source}`).join("|"));
const MATH_LINES = "((?:(?!\\n[ \\t]*\\n)[^]){1,2000}?)";
const DISPLAYED_MATH = new RegExp(`^ {0,3}(?:\\$\\$${MATH_LINES}\\$\\$|\\\\\\[${MATH_LINES}\\\\\\])[ \\t]*(?:\\n+|$)`);
const OPEN_MATH = /^ {0,3}(?:\$\$|\\\[)(?:(?!\n[ \t]*\n)[^]){0,2000}$/;

const escaped = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const none = () => undefined;

/** MathML of a formula; what is none is shown as it is written. */
function mathml({ raw, tex, isDisplayed }) {
  try {
    return globalThis.temml.renderToString(tex, { displayMode: isDisplayed, throwOnError: true, maxExpand: 200, maxSize: [20, 200] });
  } catch {
    return `<code>${escaped(raw.trim())}</code>`;
  }
}

const formula = (found, isDisplayed) => found && {
  type: "math", raw: found[0], tex: found.slice(1).find((part) => part !== undefined).trim(), isDisplayed,
};
const marked = new Marked({
  extensions: [
    {
      name: "displayed",
      level: "block",
      start: (text) => { const found = /\n {0,3}(?:\$\$|\\\[)/.exec(text); return found ? found.index + 1 : undefined; },
      // A formula that still arrives is shown as it is written.
      tokenizer: (text) => formula(DISPLAYED_MATH.exec(text), true)
        ?? (OPEN_MATH.test(text) ? { type: "plain", raw: text } : undefined),
    },
    {
      name: "math",
      level: "inline",
      start: (text) => { const found = /\\[([]|\$/.exec(text); return found ? found.index : undefined; },
      tokenizer(text) {
        const found = INLINE_MATH.exec(text);
        if (found) return formula(found, /^(?:\\\[|\$\$)/.test(text));
        return /^\\[([]/.test(text) ? { type: "text", raw: text.slice(0, 2), text: text.slice(0, 2) } : undefined;
      },
      renderer: mathml,
    },
  ],
  tokenizer: { html: none, tag: none },
  renderer: {
    heading({ tokens, depth }) {
      // The page has the two upper levels.
      const level = Math.min(depth + 2, 6);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

const BLOCK_TAGS = ["p", "br", "hr", "h3", "h4", "h5", "h6", "strong", "em", "del", "code", "pre", "blockquote", "ul", "ol",
  "li", "a", "table", "thead", "tbody", "tr", "th", "td"];
const MATH_TAGS = ["math", "mrow", "mi", "mn", "mo", "mtext", "ms", "mspace", "mfrac", "msqrt", "mroot", "mstyle", "mpadded",
  "mphantom", "msub", "msup", "msubsup", "munder", "mover", "munderover", "mmultiscripts", "mprescripts", "mtable", "mtr", "mtd"];
const MATH_ATTRIBUTES = ["display", "displaystyle", "scriptlevel", "mathvariant", "stretchy", "fence", "separator", "form",
  "lspace", "rspace", "minsize", "maxsize", "symmetric", "largeop", "movablelimits", "accent", "accentunder", "linethickness",
  "width", "height", "depth", "voffset", "columnalign", "rowspacing", "columnspacing", "columnlines", "rowlines"];
const COMMON = { RETURN_DOM_FRAGMENT: true, ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false };
const PROSE = { ...COMMON, ALLOWED_TAGS: [...BLOCK_TAGS, ...MATH_TAGS],
  ALLOWED_ATTR: ["href", "start", "align", "class", ...MATH_ATTRIBUTES],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i };
const COLOURS = { ...COMMON, ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"] };

let highlighter = null;

/** highlight.js, loaded when the first block of code is complete. */
function loadHighlighter() {
  highlighter ??= import("./vendor/highlight.min.js").then((module) => module.default).catch(() => null);
  return highlighter;
}

function element(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

/** A frame around code: its language and a button that copies. */
function framed(pre, language) {
  const copy = element("button", "copy", "Copy");
  copy.type = "button";
  copy.setAttribute("aria-label", language ? `Copy the ${language} code` : "Copy the code");
  copy.addEventListener("click", () => copyText(pre.textContent, copy));
  return element("figure", "code", element("figcaption", "", element("span", "", language || "text"), copy), pre);
}

/** Copies text, and says on the button whether that worked. */
export async function copyText(text, button) {
  const label = button.dataset.label ??= button.textContent;
  let said = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without HTTPS, browsers have the older way only.
    const area = element("textarea", "hidden");
    area.value = text;
    document.body.append(area);
    area.select();
    if (!document.execCommand("copy")) said = "Not copied";
    area.remove();
    button.focus();
  }
  button.textContent = said;
  document.getElementById("announcer").textContent = said;
  setTimeout(() => { button.textContent = label; }, 1500);
}

const languageOf = (given) => (given || "").trim().split(/\s/)[0].slice(0, 30);

async function highlight(code, language, done) {
  const known = await loadHighlighter(), text = code.textContent;
  const grammar = known?.getLanguage(language);
  if (!grammar || !code.isConnected || text.length > (grammar.name === "Swift" ? MOST_SWIFT : MOST_HIGHLIGHTED)) return;
  const value = known.highlight(text, { language, ignoreIllegals: true }).value;
  const fragment = DOMPurify.sanitize(value, COLOURS);
  if (fragment.textContent !== text || code.textContent !== text) return;
  code.replaceChildren(fragment);
  done();
}

const FENCE = /^ {0,3}(`{3,}|~{3,})[^\n]*(?:\n|$)/;

/** The end of a block of code after its opening fence; -1 where the fence is not closed. */
function endOfCode(text, fence) {
  const closing = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}[ \\t]*(?:\\n|$)`, "m").exec(text.slice(fence[0].length));
  return closing ? fence[0].length + closing.index + closing[0].length : -1;
}

function isOpenCode(token) {
  const fence = token.type === "code" && FENCE.exec(token.raw);
  return Boolean(fence) && endOfCode(token.raw, fence) < 0;
}

/** The beginning of a text that is parsed at once: all of a short one, a block of code, or what ends with a blank line. */
function firstPart(text) {
  const fence = FENCE.exec(text);
  if (fence) {
    const end = endOfCode(text, fence);
    return end < 0 ? text : text.slice(0, end);
  }
  const limit = text.startsWith("|") ? MOST_TABLE : MOST_PARSED;
  if (text.length <= limit) return text;
  const last = text.lastIndexOf("\n\n", limit - 2), end = last > 0 ? last : text.indexOf("\n\n", limit);
  return end < 0 ? text : text.slice(0, end + 2);
}

/** The blocks of a text; one that is too large, or nested too deeply, is shown as it is written. */
function parsed(text) {
  if (text.length <= (text.startsWith("|") ? MOST_TABLE : MOST_PARSED) || FENCE.test(text)) {
    try {
      return marked.lexer(text);
    } catch { /* Too many quotes or lists within each other. */ }
  }
  return [{ type: "plain", raw: text }];
}

/** A rendered text that grows. `tint.paint(block, raw, offset)` is called for every block that has changed. */
export class MarkdownView {
  constructor(root, tint) {
    this.root = root;
    this.tint = tint;
    this.blocks = [];
    this.settled = 0;
    this.remainder = null;
  }

  /** Shows `source`, which begins with what was shown before. */
  update(source, isFinal = false) {
    if (this.remainder) {
      this.extend(source);
      return;
    }
    let place = this.settled, end = -1;
    for (const { token, offset } of this.tokens(source)) {
      if (place >= MOST_BLOCKS || offset >= MOST_RENDERED) {
        end = offset;
        break;
      }
      const isComplete = isFinal || offset + token.raw.length < source.length;
      let block = this.blocks[place];
      if (!block) {
        block = { raw: null, offset: -1, body: element("div", "block") };
        this.root.append(block.body);
        this.blocks.push(block);
      }
      if (block.raw !== token.raw || block.offset !== offset) this.fill(block, token, offset);
      if (token.type === "code" && isComplete && !block.isComplete) this.complete(block);
      place += 1;
    }
    for (const block of this.blocks.splice(place)) {
      this.tint.clear(block);
      block.body.remove();
    }
    this.settled = Math.max(this.settled, this.blocks.length - LIVE_BLOCKS);
    if (end < 0) return;
    const text = document.createTextNode("");
    this.remainder = { offset: end, text, isPlain: true, body: element("div", "block", element("p", "plain", text)) };
    this.root.append(this.remainder.body);
    this.extend(source);
  }

  /** Shows what a text beyond the limits has gained, as it is written. */
  extend(source) {
    const { offset, text } = this.remainder;
    text.appendData(source.slice(offset + text.length));
    this.tint.paint(this.remainder);
  }

  /** The blocks of the text from the first that may still change, parsed in parts of bounded size. */
  *tokens(source) {
    let offset = this.blocks[this.settled]?.offset ?? 0;
    while (offset < source.length) {
      const tail = source.slice(offset), part = firstPart(tail);
      let tokens = parsed(part);
      if (part.length < tail.length && tokens.length > 1 && isOpenCode(tokens.at(-1))) tokens = tokens.slice(0, -1);
      for (const token of tokens) {
        if (token.type !== "space") yield { token, offset };
        offset += token.raw.length;
      }
    }
  }

  fill(block, token, offset) {
    const growth = block.text && token.type === "code" && block.offset === offset && block.language === languageOf(token.lang)
      && token.text.startsWith(block.text.data) ? token.text.slice(block.text.length) : null;
    block.raw = token.raw;
    block.offset = offset;
    if (growth !== null && !block.isComplete) {
      block.text.appendData(growth);
    } else {
      this.tint.clear(block);
      block.text = null;
      block.isComplete = false;
      block.body.replaceChildren(...this.contents(block, token));
    }
    this.tint.paint(block);
  }

  contents(block, token) {
    if (token.type === "plain") return [element("p", "plain", token.raw)];
    if (token.type === "code") {
      block.language = languageOf(token.lang);
      block.text = document.createTextNode(token.text);
      return [framed(element("pre", "", element("code", "", block.text)), block.language)];
    }
    const fragment = DOMPurify.sanitize(marked.parser([token]), PROSE);
    for (const link of fragment.querySelectorAll("a")) {
      link.target = "_blank";
      link.rel = "noopener noreferrer nofollow";
    }
    for (const table of fragment.querySelectorAll("table")) {
      const scroller = element("div", "table");
      table.replaceWith(scroller);
      scroller.append(table);
    }
    for (const code of fragment.querySelectorAll("pre > code")) {
      const pre = code.parentElement, holder = document.createComment("");
      pre.replaceWith(holder);
      holder.replaceWith(framed(pre, languageOf(code.className.replace(/^language-/, ""))));
    }
    return [fragment];
  }

  complete(block) {
    block.isComplete = true;
    highlight(block.body.querySelector("code"), block.language, () => {
      this.tint.clear(block);
      this.tint.paint(block);
    });
  }
}
