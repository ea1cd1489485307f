// The turns of a conversation on the page.

import { MarkdownView } from "./markdown.js";
import { RoundsView } from "./rounds.js";
import { Pieces, Tint } from "./tint.js";

export function element(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

export function button(text, action, className = "", label = "") {
  const node = element("button", className, text);
  node.type = "button";
  if (label) { node.setAttribute("aria-label", label); node.title = label; }
  node.addEventListener("click", () => action(node));
  return node;
}

/** Shows an image or a video of a message. */
export function mediumView({ kind, url, name }) {
  const node = element(kind === "image" ? "img" : "video", "medium");
  node.src = url;
  node.title = name;
  node.setAttribute(kind === "image" ? "alt" : "aria-label", name);
  node.controls = true;
  return node;
}

/** Replaces a text by a field to edit it in. */
function editor(view, label, save) {
  const area = element("textarea", ""), before = [...view.body.children];
  area.value = view.turn.content;
  area.setAttribute("aria-label", "Text of this turn");
  const cancel = () => { view.body.replaceChildren(...before); view.focusEdit(); };
  const apply = () => { if (area.value.trim()) save(area.value.trim()); };
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.preventDefault(); cancel(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && view.turn.role === "user") { event.preventDefault(); apply(); }
  });
  const row = element("div", "actions", button(label, apply), button("Cancel", cancel, "quiet"));
  view.body.replaceChildren(before[0], area, row);
  area.style.height = `${Math.min(area.scrollHeight + 4, 400)}px`;
  area.focus();
}

class TurnView {
  constructor(parent, turn, name, actions) {
    this.turn = turn;
    this.actions = actions;
    this.body = element("article", `turn ${turn.role}`, element("h2", "", name));
    this.body.setAttribute("aria-label", name);
    parent.append(this.body);
  }

  focusEdit() { this.body.querySelector(".edit")?.focus(); }
}

export class UserView extends TurnView {
  constructor(parent, turn, actions) {
    super(parent, turn, "You", actions);
    if (turn.media) this.body.append(element("div", "media", ...turn.media.map(mediumView)));
    if (turn.content) this.body.append(element("div", "text", turn.content));
    this.body.append(element("div", "actions",
      button("Edit", () => editor(this, "Send", actions.edit), "quiet edit"),
      button("Copy", actions.copy, "quiet copy-turn")));
  }
}

export class AnswerView extends TurnView {
  constructor(parent, turn, actions) {
    super(parent, turn, "Model", actions);
    turn.runs ??= { content: [], reasoning: [] };
    this.pieces = new Pieces();
    this.texts = {};
    this.content = element("div", "text");
    this.figures = element("span", "figures");
    this.showRounds = button("Rounds", () => this.toggleRounds(), "quiet show-rounds");
    this.buttons = element("div", "actions",
      button("Copy", actions.copy, "quiet copy-turn"),
      button("Regenerate", actions.regenerate, "quiet regenerate"),
      button("Edit", () => editor(this, "Save", actions.edit), "quiet edit"), this.showRounds, this.figures);
    this.body.append(this.content, this.buttons);
    if (turn.rounds?.length) this.showRounds.setAttribute("aria-expanded", "false");
    this.update(true);
  }

  /** Adds what a chunk of the stream brings. */
  take(chunk) {
    const choice = chunk.choices[0];
    if (!choice) return;
    if (choice.drafts) this.pieces.add(choice.drafts);
    for (const [name, delta] of [["reasoning", choice.delta.reasoning_content], ["content", choice.delta.content]]) {
      if (!delta) continue;
      const text = delta.replaceAll("\r", "");
      this.pieces.assign(text, this.turn[name].length, this.turn.runs[name]);
      this.turn[name] += text;
    }
    if (choice.finish_reason) this.turn.reason = choice.finish_reason;
  }

  /** Shows what the turn has. */
  update(isFinal = false) {
    const { turn } = this;
    if (turn.reasoning) this.text("reasoning").update(turn.reasoning, isFinal || Boolean(turn.content));
    if (turn.content) this.text("content").update(turn.content, isFinal);
    this.content.classList.toggle("waiting", Boolean(this.isBusy) && !turn.content);
    if (this.rounds && turn.rounds) this.rounds.update(turn.rounds);
    if (!isFinal) return;
    this.explainRounds();
    this.showRounds.textContent = turn.rounds ? "Rounds" : "Show rounds";
    this.showRounds.title = turn.rounds ? "" : "Answers again with the same seed, and records what each round drafted";
    this.showRounds.hidden = !turn.request || Boolean(turn.error);
    if (turn.rounds) this.showRounds.setAttribute("aria-expanded", String(Boolean(this.rounds)));
    this.figures.textContent = turn.stats ? this.summary(turn.stats) : "";
    this.body.querySelector(":scope > .error")?.remove();
    if (turn.error) this.buttons.before(element("p", "error", turn.error));
  }

  summary({ tokens, accepted, rate, speedup }) {
    const parts = [`${tokens} tokens`, `${rate.toFixed(0)} tokens/s`];
    if (speedup) parts.push(`${speedup.toFixed(1)} × plain`);
    if (tokens) parts.push(`${Math.round((100 * accepted) / tokens)} % drafted`);
    return parts.join(" · ");
  }

  text(name) {
    if (!this.texts[name]) {
      let place = this.content;
      if (name === "reasoning") {
        place = element("div", "text");
        this.content.before(element("details", "thought", element("summary", "", "Thinking"), place));
      }
      this.texts[name] = new MarkdownView(place, new Tint(this.turn.runs[name]));
    }
    return this.texts[name];
  }

  setBusy(isBusy) {
    this.isBusy = isBusy;
    this.buttons.hidden = isBusy;
    this.body.setAttribute("aria-busy", String(isBusy));
    this.content.classList.toggle("waiting", isBusy && !this.turn.content);
    if (isBusy && this.turn.rounds) this.toggleRounds();
  }

  toggleRounds() {
    if (!this.turn.rounds) {
      this.actions.replay();
      return;
    }
    if (this.rounds) {
      this.rounds.body.remove();
      this.rounds = null;
    } else {
      this.rounds = new RoundsView(element("div", ""));
      this.rounds.update(this.turn.rounds);
      this.buttons.after(this.rounds.body);
      this.explainRounds();
    }
    this.showRounds.setAttribute("aria-expanded", String(Boolean(this.rounds)));
  }

  /** Rounds with drafts are recorded by programs that the server may still be compiling. */
  async explainRounds() {
    const { rounds } = this;
    if (!rounds || rounds.drafting || this.turn.request?.block_size === 1) return;
    const { compiled, failed = 0, total } = (await this.actions.warmUp()) ?? {};
    if (compiled + failed < total) {
      rounds.explain(`The server is still compiling (${compiled} of ${total} programs): rounds without drafts for now`);
    }
  }
}
