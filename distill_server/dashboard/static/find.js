// Search in a long text: counts the matches, highlights them and moves from one to the next.

import {el, setText} from "./dom.js";

const MS_BEFORE_SEARCH = 150;
const MOST_MATCHES = 5000;

/** The search field of one text node within a scrolled element. */
export class Find {
  constructor(node, scrolled) {
    this.node = node;
    this.scrolled = scrolled;
    this.matches = [];
    this.at = -1;
    this.field = el("input", {
      type: "search", placeholder: "find in the log", "aria-label": "Find in the log", maxlength: 200,
      spellcheck: "false", autocomplete: "off",
      input: () => this.searchSoon(), keydown: (event) => this.onKey(event),
    });
    this.count = el("span", {role: "status", class: "hint"});
    this.previous = el("button", {type: "button", disabled: true, click: () => this.move(-1)}, "Previous");
    this.next = el("button", {type: "button", disabled: true, click: () => this.move(1)}, "Next");
    this.element = el("span", {class: "find", role: "search"}, this.field, this.previous, this.next, this.count);
  }

  /** Searches again after the text has changed; the match that is shown stays the same. */
  refresh() {
    if (this.field.value && !this.typing) this.search(this.matches[this.at]);
  }

  searchSoon() {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.searchNow(), MS_BEFORE_SEARCH);
  }

  searchNow() {
    clearTimeout(this.typing);
    this.typing = 0;
    this.search();
    this.move(0);
  }

  search(kept) {
    const wanted = this.field.value.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&");
    this.matches = [];
    for (const {index} of wanted ? this.node.data.matchAll(new RegExp(wanted, "gi")) : []) {
      if (this.matches.push(index) >= MOST_MATCHES) break;
    }
    const same = this.matches.indexOf(kept);
    // The log is read at its end, so the search starts there.
    this.at = same < 0 ? this.matches.length - 1 : same;
    this.tell();
  }

  onKey(event) {
    if (event.key !== "Enter") return;
    event.preventDefault();
    if (this.typing) this.searchNow();
    else this.move(event.shiftKey ? -1 : 1);
  }

  /** Shows the next match, or the previous one for -1; after the last follows the first. */
  move(by) {
    const {length} = this.matches;
    if (!length) return;
    this.at = (Math.max(0, this.at) + by + length) % length;
    this.tell();
    const range = document.createRange();
    const {startContainer: node, startOffset: first, endOffset: end} = this.place(this.matches[this.at]);
    range.setStart(node, first);
    range.setEnd(node, end);
    const box = range.getBoundingClientRect();
    const outer = this.scrolled.getBoundingClientRect();
    this.scrolled.scrollTop += box.top - outer.top - outer.height / 2;
  }

  tell() {
    const {length} = this.matches;
    const most = length >= MOST_MATCHES ? "+" : "";
    const told = length ? `${this.at + 1} of ${length}${most}` : "no match in the lines shown";
    setText(this.count, this.field.value ? told : "");
    this.previous.disabled = this.next.disabled = !length;
    // Older browsers have no highlights: there the text is only scrolled.
    if (!globalThis.CSS?.highlights) return;
    const ranges = this.matches.map((at) => new StaticRange(this.place(at)));
    CSS.highlights.set("found", new Highlight(...ranges));
    CSS.highlights.set("found-here", new Highlight(...ranges.slice(this.at, this.at + 1)));
  }

  place(at) {
    const [node, end] = [this.node, at + this.field.value.length];
    return {startContainer: node, startOffset: at, endContainer: node, endOffset: end};
  }
}
