// Images and videos of the message that is being written: chosen, pasted or dropped.

import { button, element, mediumView } from "./turns.js";

// An image of more than LARGE_BYTES is sent with at most MOST_SIDE pixels a side: the model reads no more, and the browser
// keeps little.
const LARGE_BYTES = 2 ** 20, MOST_SIDE = 2048, MOST_BYTES = 32 * 2 ** 20;

export class Attachments {
  /**
   * @param strip Shows what is attached.
   * @param choose The button that opens the list of files; hidden where the model reads text only.
   * @param input The field of files.
   * @param prompt The field into which one pastes.
   * @param say Shows a problem.
   */
  constructor({ strip, choose, input, prompt }, say) {
    Object.assign(this, { strip, choose, say, list: [], unread: 0 });
    choose.addEventListener("click", () => input.click());
    input.addEventListener("change", () => { this.add(input.files); input.value = ""; });
    prompt.addEventListener("paste", (event) => this.receive(event, event.clipboardData));
    document.addEventListener("drop", (event) => this.receive(event, event.dataTransfer));
    document.addEventListener("dragover", (event) => {
      if (!choose.hidden && event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
  }

  receive(event, { files }) {
    if (this.choose.hidden || !files.length) return;
    event.preventDefault();
    this.add(files);
  }

  async add(files) {
    for (const file of [...files]) {
      this.unread += 1;
      try {
        this.list.push(await read(file));
      } catch (error) {
        this.say(error.message, true);
      }
      this.unread -= 1;
      this.show();
    }
  }

  show() {
    this.strip.replaceChildren(...this.list.map((medium) => element("li", "", mediumView(medium), button("✕", () => {
      this.list = this.list.filter((other) => other !== medium);
      this.show();
      (this.strip.querySelector("button") ?? this.choose).focus();
    }, "icon", `Remove ${medium.name}`))));
    this.strip.hidden = !this.list.length;
  }

  /** Returns what is attached, and removes it from the message. */
  take() {
    const taken = this.list;
    this.list = [];
    this.show();
    return taken;
  }
}

async function read(file) {
  const kind = file.type.split("/")[0];
  if (!["image", "video"].includes(kind)) throw new Error(`${file.name} is neither an image nor a video.`);
  if (file.size > MOST_BYTES) throw new Error(`${file.name} has ${file.size} bytes: at most ${MOST_BYTES} are possible.`);
  try {
    const content = kind === "image" && file.size > LARGE_BYTES ? await smaller(file) : file;
    return { kind, url: await asUrl(content), name: file.name || kind };
  } catch {
    throw new Error(`${file.name} cannot be read.`);
  }
}

async function smaller(file) {
  const picture = await createImageBitmap(file), scale = MOST_SIDE / Math.max(picture.width, picture.height);
  if (scale >= 1) return file;
  const canvas = new OffscreenCanvas(Math.round(scale * picture.width) || 1, Math.round(scale * picture.height) || 1);
  const context = canvas.getContext("2d");
  // JPEG has no transparency.
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  picture.close();
  return canvas.convertToBlob({ type: "image/jpeg", quality: 0.92 });
}

const asUrl = (content) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(content);
});
