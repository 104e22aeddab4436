// A dialog that asks for a decision.

import {el} from "./dom.js";

/** Shows `dialog` with a title, a body and buttons: `[label, class, chosen]`; null is left out. */
export function ask(dialog, title, body, choices) {
  const buttons = choices.filter(Boolean).map(([label, kind, chosen]) =>
    el("button", {type: "button", class: kind, click: () => {
      dialog.close();
      chosen();
    }}, label));
  dialog.setAttribute("aria-label", title);
  dialog.replaceChildren(el("h2", {}, title), ...body, el("div", {class: "choices"}, buttons));
  dialog.showModal();
}
