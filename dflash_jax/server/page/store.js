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

const isText = (value) => typeof value === "string", isNumber = Number.isFinite;
const isListOf = (isItem) => (value) => Array.isArray(value) && value.every(isItem);
const areNumbers = isListOf(isNumber), areTexts = isListOf(isText);
const isRound = (r) => Array.isArray(r) && areTexts(r[0]) && isNumber(r[1]) && isText(r[2]);

const isMedium = (m) => isText(m?.name) && isText(m.url) && ["image", "video"].includes(m.kind)
  && m.url.startsWith(`data:${m.kind}/`);

/** Whether an optional field of a turn has the shape that this page writes. */
const SHAPES = {
  reasoning: isText,
  error: isText,
  request: (value) => value !== null && typeof value === "object" && !Array.isArray(value),
  runs: (value) => areNumbers(value?.content) && areNumbers(value.reasoning),
  stats: (value) => ["tokens", "accepted", "rounds", "rate"].every((name) => isNumber(value?.[name]))
    && isNumber(value.speedup ?? 0),
  rounds: isListOf(isRound),
  media: isListOf(isMedium),
};

const isTurn = (t) => ["user", "assistant"].includes(t?.role) && isText(t.content);

/** The conversation in a stored value, without fields of another shape; null where the value is no conversation. */
export function asConversation(value) {
  if (!isText(value?.id) || !isText(value.title) || !isListOf(isTurn)(value.turns)) return null;
  for (const turn of value.turns) for (const name in SHAPES) if (!SHAPES[name](turn[name])) delete turn[name];
  if (!isNumber(value.updated)) value.updated = 0;
  return value;
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
        const value = asConversation(read(local, key));
        // A conversation under the key of another one could not be deleted.
        if (value && key === CONVERSATION + value.id) loaded.set(value.id, value);
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
