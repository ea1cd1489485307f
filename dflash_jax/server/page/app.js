"use strict";

const $ = (id) => document.getElementById(id);
const messages = [];
let running = null;

const key = () => ($("key").value ? { Authorization: `Bearer ${$("key").value}` } : {});

async function showModel() {
  try {
    const found = await (await fetch("v1/models", { headers: key() })).json();
    $("model").textContent = found.data ? found.data[0].id : "";
  } catch {
    say("The server cannot be reached.", true);
  }
}

function say(text, isError = false) {
  $("status").textContent = text;
  $("status").className = isError ? "error" : "";
}

function element(tag, className, parent) {
  const made = document.createElement(tag);
  made.className = className;
  parent.append(made);
  return made;
}

function addMessage(role, text = "") {
  const box = element("article", `message ${role}`, $("log"));
  element("div", "who", box).textContent = role === "user" ? "You" : "Model";
  const body = element("div", "body", box);
  if (text) element("div", "text", body).textContent = text;
  $("log").scrollTop = $("log").scrollHeight;
  return body;
}

/* Which characters of the text were drafted: pieces come with the text as the model wrote it, of which some
   (tags, blank lines around a thought) is not shown. */
class Tint {
  constructor() { this.queue = []; }
  add(segments) { for (const [text, isDraft] of segments) for (const c of text) this.queue.push([c, isDraft]); }
  *split(text) {
    let held = "", was = false;
    for (const c of text) {
      let is = false;
      while (this.queue.length) {
        const [d, isDraft] = this.queue.shift();
        if (d === c) { is = isDraft; break; }
      }
      if (held && is !== was) { yield [held, was]; held = ""; }
      held += c;
      was = is;
    }
    if (held) yield [held, was];
  }
}

class Answer {
  constructor(body) {
    this.body = body;
    this.tint = new Tint();
    this.content = this.reasoning = "";
    this.calls = [];
    this.places = {};
  }

  place(kind) {
    if (!this.places[kind]) {
      if (kind === "reasoning") {
        const fold = element("details", "thought", this.body);
        element("summary", "", fold).textContent = "Thinking";
        this.places[kind] = element("div", "text", fold);
      } else {
        this.places[kind] = element("div", "text", this.body);
      }
    }
    return this.places[kind];
  }

  write(kind, text) {
    this[kind] += text;
    const place = this.place(kind);
    for (const [part, isDraft] of this.tint.split(text)) {
      const last = place.lastElementChild, name = isDraft ? "draft" : "own";
      if (last && last.className === name) last.textContent += part;
      else element("span", name, place).textContent = part;
    }
  }

  take(chunk) {
    const choice = chunk.choices[0];
    if (!choice) return;
    if (choice.drafts) this.tint.add(choice.drafts);
    if (choice.delta.reasoning_content) this.write("reasoning", choice.delta.reasoning_content);
    if (choice.delta.content) this.write("content", choice.delta.content);
    if (choice.finish_reason) this.reason = choice.finish_reason;
  }
}

function figures(usage, timings) {
  const details = usage.completion_tokens_details;
  $("count").textContent = usage.completion_tokens;
  $("speed").textContent = timings.tokens_per_s.toFixed(0);
  const rounds = details.draft_rounds;
  $("acceptance").textContent = rounds ? (1 + details.accepted_prediction_tokens / rounds).toFixed(2) : "plain";
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    let end;
    while ((end = held.indexOf("\n\n")) >= 0) {
      const data = held.slice(0, end).replace(/^data: /, "");
      held = held.slice(end + 2);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function wanted() {
  const body = {
    messages: $("system").value ? [{ role: "system", content: $("system").value }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true, include_timings: true },
    return_drafts: true,
    chat_template_kwargs: { enable_thinking: $("thinking").checked },
    block_size: $("block_size").value === "auto" ? "auto" : Number($("block_size").value),
  };
  for (const name of ["temperature", "top_p", "top_k", "seed", "max_tokens"]) {
    if ($(name).value !== "") body[name] = Number($(name).value);
  }
  return body;
}

async function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  messages.push({ role: "user", content: text });
  addMessage("user", text);
  $("prompt").value = "";
  const answer = new Answer(addMessage("assistant"));
  running = new AbortController();
  $("stop").disabled = false;
  $("send").disabled = true;
  say("Answering …");
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...key() },
      body: JSON.stringify(wanted()),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      answer.take(chunk);
      if (chunk.usage) figures(chunk.usage, chunk.timings);
      const log = $("log");
      if (log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
    }
    say({ length: "The limit of new tokens was reached.", tool_calls: "The model called a tool." }[answer.reason] || "");
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else say(error.message, true);
  } finally {
    if (answer.content || answer.reasoning) messages.push({ role: "assistant", content: answer.content });
    running = null;
    $("stop").disabled = true;
    $("send").disabled = false;
    $("prompt").focus();
  }
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) running.abort(); });
$("stop").addEventListener("click", () => running && running.abort());
$("clear").addEventListener("click", () => {
  if (running) running.abort();
  messages.length = 0;
  $("log").replaceChildren();
  for (const id of ["speed", "acceptance", "count"]) $(id).textContent = "–";
  say("");
  $("prompt").focus();
});
$("tint").addEventListener("change", () => $("log").classList.toggle("tinted", $("tint").checked));
$("log").classList.add("tinted");
$("key").addEventListener("change", showModel);
showModel();
