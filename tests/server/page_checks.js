// What tests look at on the page.
window.checks = {
  controls: "input, select, textarea, button, summary, a[href]",

  /** Texts whose contrast with what is behind them is less than 4.5. */
  contrast() {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (colour) => {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const variable = (name) => rgba(getComputedStyle(document.documentElement).getPropertyValue(name));
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const luminance = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => sum + weight * linear(c[i] / 255), 0);
    const ratio = (a, b) => {
      const [light, dark] = [luminance(a), luminance(b)].sort((x, y) => y - x);
      return (light + 0.05) / (dark + 0.05);
    };
    const behind = (e) => {
      for (; e; e = e.parentElement) {
        const colour = rgba(getComputedStyle(e).backgroundColor);
        if (colour[3] > 250) return colour;
      }
      return variable("--back");
    };
    const tint = variable("--tint"), poor = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node; (node = walker.nextNode()); ) {
      const e = node.parentElement, colour = getComputedStyle(e).color;
      const isShown = e.checkVisibility({ visibilityProperty: true, opacityProperty: true });
      if (!node.data.trim() || !isShown || e.closest(".hidden, noscript, :disabled")) continue;
      for (const back of e.closest(".block") ? [behind(e), tint] : [behind(e)]) {
        const value = ratio(rgba(colour), back);
        if (value < 4.5) poor.push([node.data.trim().slice(0, 30), e.className, value.toFixed(2), colour, String(back)]);
      }
    }
    return poor;
  },

  /** Controls without a name. */
  nameless() {
    const name = (e) => e.getAttribute("aria-label") || [...(e.labels ?? [])].map((l) => l.textContent.trim()).join("");
    return [...document.querySelectorAll(this.controls)].filter((e) => !name(e) && !e.textContent.trim()).map((e) => e.outerHTML);
  },

  /** Numbers of the controls that Tab has to reach. */
  reachable() {
    const isShown = (e) => !e.disabled && e.checkVisibility({ visibilityProperty: true }) && !e.closest("dialog:not([open])");
    return [...document.querySelectorAll(this.controls)].filter(isShown).map((e, i) => ((e.dataset.tab = i), i));
  },

  /** The number of the focused control, and the width of its outline. */
  focused() {
    const e = document.activeElement;
    return [e.dataset.tab ?? null, parseFloat(getComputedStyle(e).outlineWidth)];
  },

  /** Parts of the page that are wider than they may be. */
  overflowing() {
    const parts = [...document.querySelectorAll("body, #page, #sidebar, #scroller, #log, header, #form")];
    return parts.filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.id || e.tagName);
  },

  /** The drafted parts of the shown texts. */
  tinted() {
    const isBefore = (a, b) => (a.startContainer === b.startContainer ? a.startOffset - b.startOffset
      : a.startContainer.compareDocumentPosition(b.startContainer) & Node.DOCUMENT_POSITION_FOLLOWING ? -1 : 1);
    const ranges = [...CSS.highlights.get("drafted")].sort(isBefore);
    return ranges.map((r) => r.startContainer.data.slice(r.startOffset, r.endOffset));
  },

  distanceToEnd() {
    const s = document.querySelector("#scroller");
    return s.scrollHeight - s.scrollTop - s.clientHeight;
  },

  /** Counts frames, and measures the longest time between two, in milliseconds. */
  watchFrames() {
    this.frames = this.longestFrame = 0;
    let last = performance.now();
    const tick = () => {
      const now = performance.now();
      this.longestFrame = Math.max(this.longestFrame, now - last);
      this.frames += 1;
      last = now;
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  },

  insertHtml() {
    try {
      document.createElement("div").innerHTML = "<b>x</b>";
      return "done";
    } catch (error) {
      return error.name;
    }
  },
};
