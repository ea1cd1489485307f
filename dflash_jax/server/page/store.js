// Conversations and settings in the browser's local storage. Where that is full or disabled, they last as long as the
// page, and `problem` says so.

const CONVERSATION = "dflash.conversation.", SETTINGS = "dflash.settings", CURRENT = "dflash.current";

function read(area, key) {
  try {
    return JSON.parse(area().getItem(key));
  } catch {
    // Disabled storage, or a value that another program wrote.
    return null;
  }
}

const local = () => globalThis.localStorage, session = () => globalThis.sessionStorage;

const isStats = (s) => s === undefined || ["tokens", "accepted", "rounds", "rate"].every((name) => typeof s?.[name] === "number");
const areRuns = (r) => r === undefined || [r?.content, r?.reasoning].every(Array.isArray);
const areRounds = (r) => r === undefined || (Array.isArray(r) && r.every((round) => Array.isArray(round?.[0])));
const isTurn = (t) => ["user", "assistant"].includes(t?.role) && typeof t.content === "string" && isStats(t.stats)
  && areRuns(t.runs) && areRounds(t.rounds);

/** Whether a value is a conversation as this page writes it. */
export function isConversation(value) {
  return Boolean(value) && typeof value.id === "string" && typeof value.title === "string" && Array.isArray(value.turns)
    && value.turns.every(isTurn);
}

export class Store {
  constructor() {
    this.conversations = new Map();
    this.problem = "";
    this.load();
  }

  load() {
    const loaded = new Map();
    try {
      for (let i = 0; i < local().length; i++) {
        const key = local().key(i);
        if (!key.startsWith(CONVERSATION)) continue;
        const value = read(local, key);
        if (isConversation(value)) loaded.set(value.id, value);
      }
    } catch {
      this.problem = "This browser keeps nothing for this page: conversations are lost when the tab closes.";
    }
    for (const [id, value] of this.conversations) if (value.isUnsaved) loaded.set(id, value);
    this.conversations = loaded;
  }

  get list() { return [...this.conversations.values()].sort((a, b) => b.updated - a.updated); }

  write(area, key, value) {
    try {
      area().setItem(key, JSON.stringify(value));
      return true;
    } catch (error) {
      this.problem = error.name === "QuotaExceededError"
        ? "This browser's storage is full: export or delete conversations, or new text is lost when the tab closes."
        : "This browser keeps nothing for this page: conversations are lost when the tab closes.";
      return false;
    }
  }

  save(conversation) {
    this.conversations.set(conversation.id, conversation);
    const { isUnsaved, ...value } = conversation;
    conversation.isUnsaved = !this.write(local, CONVERSATION + conversation.id, value);
    if (!conversation.isUnsaved) this.problem = "";
    return !conversation.isUnsaved;
  }

  remove(id) {
    this.conversations.delete(id);
    try {
      local().removeItem(CONVERSATION + id);
      this.problem = "";
    } catch { /* Nothing is stored. */ }
  }

  get settings() { return read(local, SETTINGS) || {}; }
  set settings(value) { this.write(local, SETTINGS, value); }
  get current() { return read(session, CURRENT) || read(local, CURRENT); }
  set current(id) { this.write(session, CURRENT, id); this.write(local, CURRENT, id); }
  /** The API key lasts as long as the tab. */
  get key() { return read(session, "dflash.key") || ""; }
  set key(value) { this.write(session, "dflash.key", value); }
}
