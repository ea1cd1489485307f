// The server's interface: models, and answers as streams.

async function refusal(response) {
  try {
    return new Error((await response.json()).error.message);
  } catch {
    return new Error(`The server answers ${response.status} ${response.statusText}`);
  }
}

const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

export async function models(key) {
  const response = await fetch("v1/models", { headers: headers(key) });
  if (!response.ok) throw await refusal(response);
  return (await response.json()).data.map((model) => model.id);
}

/** Whether the model reads images and videos. */
export async function readsMedia(key) {
  const response = await fetch("model_info", { headers: headers(key) });
  return response.ok && (await response.json()).has_image_understanding;
}

/** Programs of the server that are compiled, have failed, and in all; null where the server does not say so. */
export async function warmUp(key) {
  try {
    const response = await fetch("server_info", { headers: headers(key) });
    return response.ok ? (await response.json()).warm_up : null;
  } catch {
    return null;
  }
}

/** Yields the chunks of an answer. */
export async function* chunks(body, key, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection to the server has ended before the answer.");
    pending += value;
    for (let end; (end = pending.indexOf("\n\n")) >= 0; ) {
      const event = pending.slice(0, end);
      pending = pending.slice(end + 2);
      // A comment says that the answer goes on.
      if (event.startsWith(":")) continue;
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}
