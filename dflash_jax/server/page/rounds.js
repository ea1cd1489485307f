// The rounds of an answer: what the drafter proposed, what the model accepted, and where it corrected.
//
// A round is [proposed texts, accepted, text of the model's own token].

function element(tag, className, text) {
  const node = document.createElement(tag);
  node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

/** A token with its blanks visible. */
const visible = (text) => text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +$/, (s) => "␣".repeat(s.length)) || "∅";

const spoken = (texts) => texts.map((t) => t.replace(/\n/g, " newline ")).join("").trim() || "blank";

export const asRound = ({ proposed, accepted, token }) => [proposed, accepted, token];

/** The rounds of an answer as a list that grows. */
export class RoundsView {
  constructor(parent) {
    this.body = element("section", "rounds");
    this.body.setAttribute("aria-label", "Rounds of this answer");
    this.key = element("p", "key");
    for (const [name, text] of [["accepted", "accepted"], ["rejected", "rejected"], ["unused", "after the rejected one"],
      ["corrected", "the model's own token"]]) {
      const sample = element("span", "", "");
      sample.append(element("span", `token ${name}`, "abc"), ` ${text}`);
      this.key.append(sample, " ");
    }
    this.summary = element("p", "summary");
    this.list = element("ol", "");
    this.body.append(this.summary, this.key, this.list);
    parent.append(this.body);
    this.count = this.proposed = this.accepted = this.drafting = 0;
    this.note = "";
  }

  /** Shows the rounds after those that are shown. */
  update(rounds) {
    for (; this.count < rounds.length; this.count++) this.add(rounds[this.count], this.count);
    this.summarise();
  }

  /** Says in place of the summary why rounds have no drafts, as long as none has. */
  explain(note) {
    this.note = note;
    this.summarise();
  }

  summarise() {
    this.summary.textContent = this.drafting
      ? `${this.count} rounds: ${this.proposed} tokens proposed, ${this.accepted} accepted, `
        + `${((this.accepted + this.drafting) / this.drafting).toFixed(2)} tokens a round`
      : this.note || `${this.count} rounds without drafts`;
  }

  add([proposed, accepted, token], index) {
    if (!proposed.length) {
      this.addPlain(token, index);
      return;
    }
    this.plain = null;
    this.drafting += 1;
    this.proposed += proposed.length;
    this.accepted += accepted;
    // A text may end with a draft that the model confirms.
    const isConfirmed = proposed[accepted] === token;
    const row = element("li", "round"), all = accepted === proposed.length;
    row.append(element("span", "hidden", `Round ${index + 1}: ${accepted} of ${proposed.length} drafts accepted`
      + `${accepted ? `, ${spoken(proposed.slice(0, accepted))}` : ""}. ${all || isConfirmed ? "Then" : "Corrected to"}: ${spoken([token])}.`));
    const number = element("span", "number", `${index + 1}`), tokens = element("span", "tokens");
    number.setAttribute("aria-hidden", "true");
    tokens.setAttribute("aria-hidden", "true");
    proposed.forEach((text, i) => {
      const kind = i < accepted || (i === accepted && isConfirmed) ? "accepted" : i === accepted ? "rejected" : "unused";
      tokens.append(element("span", `token ${kind}`, visible(text)));
      if (i === accepted && !isConfirmed) tokens.append(element("span", "token corrected", visible(token)));
    });
    if (all) tokens.append(element("span", "token corrected", visible(token)));
    const share = element("span", "share", `${accepted}/${proposed.length}`);
    share.setAttribute("aria-hidden", "true");
    row.append(number, tokens, share);
    this.list.append(row);
  }

  /** Successive rounds without drafts are one row. */
  addPlain(token, index) {
    if (!this.plain) {
      const row = element("li", "round plain"), number = element("span", "number", `${index + 1}`);
      this.plain = element("span", "tokens");
      number.setAttribute("aria-hidden", "true");
      row.append(number, this.plain, element("span", "share", "plain"));
      this.list.append(row);
    }
    this.plain.append(element("span", "token corrected", visible(token)));
  }
}
