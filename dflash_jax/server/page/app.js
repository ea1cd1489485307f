// The page at /: conversations with the model, kept in this browser.

import { Attachments } from "./attachments.js";
import { copyText } from "./markdown.js";
import { Store } from "./store.js";
import { chunks, models, readsMedia, warmUp } from "./stream.js";
import { clearAll } from "./tint.js";
import { asRound } from "./rounds.js";
import { AnswerView, button, element, UserView } from "./turns.js";

const $ = (id) => document.getElementById(id);

const NUMBERS = ["temperature", "top_p", "top_k", "seed", "max_tokens"];
const FIELDS = [...NUMBERS, "block_size", "system"], CHECKS = ["thinking", "tint", "record"];
const EXAMPLES = [
  "Explain speculative decoding to a ten-year-old.",
  "Write a Python function that merges two sorted lists.",
  "What are three differences between a virus and a bacterium? Answer as a table.",
  "Write a short story about a lighthouse keeper.",
];
const RETRY_MS = 5000, SAVE_MS = 2000, MOST_ANNOUNCED = 600;

const store = new Store();
const attachments = new Attachments({ strip: $("attachments"), choose: $("attach"), input: $("files"), prompt: $("prompt") }, say);
let conversation, running = null, views = [], undo = null;

// Status and figures

function say(text, isError = false) {
  $("status-text").textContent = text;
  $("status").className = isError ? "error" : "";
  if (text) announce(text);
}

/** Has a screen reader say a text, once. */
function announce(text) { $("announcer").textContent = text; }

function offerUndo(text, action) {
  say(text);
  undo = action;
  $("undo").hidden = false;
}

function withdrawUndo() {
  undo = null;
  $("undo").hidden = true;
}

function showFigures(stats) {
  const known = stats && stats.tokens > 0;
  $("speed").textContent = known ? stats.rate.toFixed(0) : "–";
  $("speedup").textContent = known && stats.speedup ? stats.speedup.toFixed(1) : "–";
  $("drafted").textContent = known ? `${Math.round((100 * stats.accepted) / stats.tokens)} %` : "–";
  $("acceptance").textContent = known ? (stats.rounds ? (1 + stats.accepted / stats.rounds).toFixed(2) : "plain") : "–";
}

const statsOf = ({ usage, timings }, turn) => ({
  tokens: usage.completion_tokens,
  accepted: usage.completion_tokens_details.accepted_prediction_tokens,
  rounds: usage.completion_tokens_details.draft_rounds,
  rate: timings.tokens_per_s,
  // A recorded answer is slower, since each of its rounds is one step.
  speedup: turn.rounds ? null : timings.speedup,
});

// The text is followed to its end, unless the reader has scrolled up.

const scroller = $("scroller");
let follows = true, lastTop = 0;

const atEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;

scroller.addEventListener("scroll", () => {
  if (scroller.scrollTop < lastTop - 1) follows = false;
  if (atEnd()) follows = true;
  lastTop = scroller.scrollTop;
  $("to-end").hidden = follows;
}, { passive: true });

function follow(always = false) {
  if (always) follows = true;
  if (follows) scroller.scrollTop = scroller.scrollHeight;
  $("to-end").hidden = follows || atEnd();
}

/** Calls `render` at most once a frame, and for at most a quarter of the time. */
class Frames {
  constructor(render) { this.render = render; this.next = 0; this.isPending = false; }

  request() {
    if (this.isPending) return;
    this.isPending = true;
    const wait = this.next - performance.now();
    if (wait > 0) setTimeout(() => requestAnimationFrame(() => this.run()), wait);
    else requestAnimationFrame(() => this.run());
  }

  run() {
    if (!this.isPending) return;
    this.isPending = false;
    const began = performance.now();
    this.render();
    const ended = performance.now();
    this.next = ended + 3 * (ended - began);
  }

  cancel() { this.isPending = false; }
}

// Conversations

const fresh = () => ({ id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "", turns: [], updated: Date.now() });

function save() {
  if (!conversation.turns.length) return;
  const first = conversation.turns[0].content.trim().split("\n")[0];
  conversation.title ||= first.length > 60 ? `${first.slice(0, 60)}…` : first || "Conversation";
  conversation.updated = Date.now();
  const hadProblem = store.problem;
  if (!store.save(conversation) && store.problem !== hadProblem) say(store.problem, true);
  store.current = conversation.id;
  listConversations();
}

function open(chosen) {
  abandon();
  withdrawUndo();
  conversation = chosen;
  store.current = conversation.id;
  say(store.problem, Boolean(store.problem));
  showTurns();
  listConversations();
  closeSidebar();
  follow(true);
}

function listConversations() {
  const focused = document.activeElement?.closest?.("#conversations li")?.dataset.id, name = document.activeElement?.className;
  $("conversations").replaceChildren(...store.list.map((each) => {
    const openIt = button(each.title, () => { open(each); focusPrompt(); }, "open");
    if (each.id === conversation.id) openIt.setAttribute("aria-current", "true");
    const item = element("li", each.id === conversation.id ? "current" : "", openIt,
      button("✎", () => rename(item, each), "icon rename", `Rename ${each.title}`),
      button("⇩", () => download(`${each.title}.json`, each), "icon export", `Export ${each.title}`),
      button("✕", () => remove(each), "icon delete", `Delete ${each.title}`));
    item.dataset.id = each.id;
    return item;
  }));
  $("export-all").disabled = !store.list.length;
  if (focused) [...$("conversations").children].find((li) => li.dataset.id === focused)?.getElementsByClassName(name)[0]?.focus();
}

function rename(item, chosen) {
  const input = element("input", "");
  input.value = chosen.title;
  input.setAttribute("aria-label", "Name of the conversation");
  const done = (applies) => {
    input.onblur = null;
    if (applies && input.value.trim()) {
      chosen.title = input.value.trim();
      store.save(chosen);
    }
    listConversations();
    document.querySelector(`#conversations li[data-id="${CSS.escape(chosen.id)}"] .open`)?.focus();
  };
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === "Escape") {
      event.preventDefault();
      event.stopPropagation();
      done(event.key === "Enter");
    }
  });
  input.onblur = () => done(true);
  item.replaceChildren(input);
  input.select();
}

function remove(chosen) {
  if (chosen === conversation) abandon();
  store.remove(chosen.id);
  if (chosen === conversation) open(fresh());
  listConversations();
  offerUndo(`“${chosen.title}” is deleted.`, () => { store.save(chosen); open(chosen); });
}

function download(name, value) {
  const { isUnsaved, ...exported } = value;
  const url = URL.createObjectURL(new Blob([JSON.stringify(exported, null, 1)], { type: "application/json" }));
  const link = element("a", "");
  link.href = url;
  link.download = name.replace(/[^\p{L}\p{N}._ -]/gu, "_").slice(-100);
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

function showTurns() {
  clearAll();
  views = [];
  $("log").replaceChildren();
  conversation.turns.forEach(addView);
  const last = conversation.turns.findLast((turn) => turn.stats);
  showFigures(last?.stats);
  $("empty").hidden = conversation.turns.length > 0;
}

function addView(turn) {
  const actions = {
    copy: (place) => copyText(turn.content, place),
    regenerate: () => regenerate(turn, {}),
    replay: () => replay(turn),
    warmUp: () => warmUp($("key").value),
    edit: (text) => (turn.role === "user" ? resend(turn, text) : rewrite(turn, text)),
  };
  const view = turn.role === "user" ? new UserView($("log"), turn, actions) : new AnswerView($("log"), turn, actions);
  views.push(view);
  return view;
}

/** Removes the turns from `index` on, and lets the reader undo that where more than `expected` of them go. */
function truncate(index, expected) {
  abandon();
  const before = conversation.turns, chosen = conversation;
  conversation.turns = before.slice(0, index);
  showTurns();
  withdrawUndo();
  const isLoss = before.slice(index).some((turn) => turn.content);
  focusPrompt();
  return () => isLoss && conversation === chosen && offerUndo(expected, () => { chosen.turns = before; open(chosen); save(); });
}

function regenerate(turn, options) {
  const later = truncate(conversation.turns.indexOf(turn), "Answered again.");
  generate(options).then(later);
}

/** Answers again with the same seed, and records the rounds. */
function replay(turn) {
  const chosen = conversation, index = chosen.turns.indexOf(turn), following = chosen.turns.slice(index + 1);
  const later = truncate(index, "The text differs from the one before.");
  generate({ ...turn.request, return_proposals: true }).then(() => {
    const again = chosen.turns[index];
    if (conversation !== chosen || again?.content !== turn.content || again.reasoning !== turn.reasoning) return later();
    // What followed the same text still follows it.
    chosen.turns.push(...following);
    following.forEach(addView);
    save();
    say("The same text, round by round.");
  });
}

function resend(turn, text) {
  const later = truncate(conversation.turns.indexOf(turn), "Edited; the turns after it were removed.");
  ask(text, turn.media).then(later);
}

function rewrite(turn, text) {
  Object.assign(turn, { content: text, runs: { content: [], reasoning: turn.runs?.reasoning || [] }, rounds: undefined, stats: undefined });
  save();
  showTurns();
}

// Answers

const withMedia = (text, media) => [
  ...media.map(({ kind, url }) => ({ type: `${kind}_url`, [`${kind}_url`]: { url } })),
  { type: "text", text },
];

function wanted(options) {
  const messages = conversation.turns.map(({ role, content, media }) => ({ role, content: media ? withMedia(content, media) : content }));
  if ($("system").value) messages.unshift({ role: "system", content: $("system").value });
  const request = {
    chat_template_kwargs: { enable_thinking: $("thinking").checked },
    block_size: $("block_size").value === "auto" ? "auto" : Number($("block_size").value),
    // With a seed, the same text can be shown round by round.
    seed: crypto.getRandomValues(new Uint32Array(1))[0],
  };
  for (const name of NUMBERS) if ($(name).value !== "") request[name] = Number($(name).value);
  if ($("record").checked) request.return_proposals = true;
  Object.assign(request, options);
  const body = {
    messages,
    ...request,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true, include_timings: true },
    return_drafts: true,
  };
  if (!$("models").hidden) body.model = $("models").value;
  return { request, body };
}

async function ask(text, media = []) {
  const turn = { role: "user", content: text };
  if (media.length) turn.media = media;
  conversation.turns.push(turn);
  addView(turn);
  await generate({});
}

/** Has the model answer the conversation. */
async function generate(options) {
  const { request, body } = wanted(options);
  const turn = { role: "assistant", content: "", reasoning: "", runs: { content: [], reasoning: [] }, request };
  if (request.return_proposals) turn.rounds = [];
  conversation.turns.push(turn);
  $("empty").hidden = true;
  const view = addView(turn), answered = conversation, controller = new AbortController();
  const frames = new Frames(() => { view.update(); showFigures(turn.stats); follow(); });
  running = { controller, turn };
  setBusy(true);
  view.setBusy(true);
  say("Answering …");
  save();
  follow(true);
  let saved = performance.now();
  try {
    for await (const chunk of chunks(body, $("key").value, controller.signal)) {
      view.take(chunk);
      const rounds = chunk.choices[0]?.proposals;
      if (rounds && turn.rounds) turn.rounds.push(...rounds.map(asRound));
      if (chunk.usage) turn.stats = statsOf(chunk, turn);
      frames.request();
      if (performance.now() - saved > SAVE_MS && conversation === answered) {
        save();
        saved = performance.now();
      }
    }
    finish({ length: "The limit of new tokens was reached.", tool_calls: "The model called a tool." }[turn.reason] || "");
  } catch (error) {
    const isStop = error.name === "AbortError";
    if (!isStop) turn.error = error.message;
    finish(isStop ? "Stopped." : error.message, !isStop);
  }

  function finish(text, isError = false) {
    frames.cancel();
    if (running?.turn !== turn) {
      if (store.conversations.has(answered.id) && answered.turns.includes(turn)) store.save(answered);
      return;
    }
    running = null;
    setBusy(false);
    view.setBusy(false);
    save();
    view.update(true);
    showFigures(turn.stats);
    follow();
    if (store.problem && !isError) say(store.problem, true);
    else say(text, isError);
    if (!text && !store.problem) {
      const answer = turn.content.slice(0, MOST_ANNOUNCED);
      announce(`The answer is complete. ${answer}${answer.length < turn.content.length ? " …" : ""}`);
    }
  }
}

function setBusy(isBusy) {
  const hadFocus = document.activeElement === $("stop");
  $("stop").hidden = !isBusy;
  $("send").hidden = isBusy;
  $("log").setAttribute("aria-busy", String(isBusy));
  if (hadFocus) $("prompt").focus();
}

function stop() { running?.controller.abort(); }

/** Stops the answer, which is not shown any longer. */
function abandon() {
  if (!running) return;
  stop();
  running = null;
  setBusy(false);
}

/** On a touch screen, focus would open the keyboard. */
function focusPrompt() { if (matchMedia("(pointer: fine)").matches) $("prompt").focus(); }

async function send(text) {
  if (running || !(text.trim() || attachments.list.length)) return;
  if (attachments.unread) return say("An image or a video is being read: send again in a moment.");
  withdrawUndo();
  $("prompt").value = "";
  await ask(text.trim(), attachments.take());
}

// Controls

function openSidebar() {
  $("sidebar").classList.add("open");
  $("open-sidebar").setAttribute("aria-expanded", "true");
  $("close-sidebar").focus();
}

function closeSidebar() {
  if (!$("sidebar").classList.contains("open")) return false;
  $("sidebar").classList.remove("open");
  $("open-sidebar").setAttribute("aria-expanded", "false");
  $("open-sidebar").focus();
  return true;
}

function keepSettings() {
  const values = Object.fromEntries([...FIELDS.map((id) => [id, $(id).value]), ...CHECKS.map((id) => [id, $(id).checked])]);
  store.settings = { ...values, model: $("models").value || store.settings.model };
  store.key = $("key").value;
}

function showTint() { $("log").classList.toggle("untinted", !$("tint").checked); }

function restoreSettings(values) {
  for (const id of FIELDS) $(id).value = typeof values[id] === "string" ? values[id] : $(id).defaultValue ?? "auto";
  for (const id of CHECKS) $(id).checked = typeof values[id] === "boolean" ? values[id] : $(id).defaultChecked;
  if (!$("block_size").value) $("block_size").value = "auto";
  showTint();
}

async function showModel() {
  try {
    const names = await models($("key").value);
    $("model").textContent = names[0] || "";
    $("models").replaceChildren(...names.map((name) => new Option(name)));
    if (names.includes(store.settings.model)) $("models").value = store.settings.model;
    const isChoice = names.length > 1;
    $("models").hidden = !isChoice;
    $("model").hidden = isChoice;
    $("attach").hidden = !(await readsMedia($("key").value));
    if ($("status").dataset.isUnreachable) say("");
    delete $("status").dataset.isUnreachable;
  } catch (error) {
    say(error instanceof TypeError ? "The server cannot be reached." : error.message, true);
    $("status").dataset.isUnreachable = "true";
    if (error instanceof TypeError) setTimeout(showModel, RETRY_MS);
  }
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); send($("prompt").value); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send($("prompt").value);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || $("settings").open || event.defaultPrevented) return;
  if (!closeSidebar()) stop();
});
$("stop").addEventListener("click", stop);
$("undo").addEventListener("click", () => { const action = undo; withdrawUndo(); say(""); action(); focusPrompt(); });
$("to-end").addEventListener("click", () => { follow(true); focusPrompt(); });
$("new").addEventListener("click", () => { open(fresh()); focusPrompt(); });
$("export-all").addEventListener("click", () => download("conversations.json", { conversations: store.list.map(({ isUnsaved, ...each }) => each) }));
$("open-sidebar").addEventListener("click", openSidebar);
$("close-sidebar").addEventListener("click", closeSidebar);
document.addEventListener("pointerdown", (event) => { if (!$("sidebar").contains(event.target) && closeSidebar()) event.preventDefault(); });
$("open-settings").addEventListener("click", () => $("settings").showModal());
$("settings").addEventListener("click", (event) => { if (event.target === $("settings")) $("settings").close(); });
$("defaults").addEventListener("click", () => { restoreSettings({}); keepSettings(); });
for (const id of [...FIELDS, ...CHECKS, "key", "models"]) $(id).addEventListener("change", keepSettings);
$("tint").addEventListener("change", showTint);
$("key").addEventListener("change", showModel);
$("examples").replaceChildren(...EXAMPLES.map((text) => element("li", "", button(text, () => { send(text); focusPrompt(); }))));
addEventListener("storage", () => {
  // Another tab has written.
  if (running) return;
  store.load();
  const other = store.conversations.get(conversation.id);
  if (other && other.updated > conversation.updated) open(other);
  else listConversations();
});
addEventListener("pagehide", () => running && save());

restoreSettings(store.settings);
$("key").value = store.key;
// The list and the model come first: a conversation that cannot be shown can still be deleted.
conversation = fresh();
listConversations();
showModel();
try {
  open(store.conversations.get(store.current) || conversation);
} catch (error) {
  open(fresh());
  say(`The last conversation cannot be shown: ${error.message}`, true);
}
