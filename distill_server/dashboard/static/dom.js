// Elements from values. Text becomes text nodes, never markup: nothing here, or anywhere else in
// the dashboard, parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element: `el("a", {href: "#/"}, "Jobs")`. Attributes that are null or false are left out;
 *  functions are listeners. */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for drawings. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Changes only what differs: a reader's selection and a screen reader's place survive. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A job's state, told by its word and a colour. */
export function badge(state) {
  return el("span", {class: `badge ${state.toLowerCase()}`}, state.toLowerCase());
}

/** A bar of what is done; indeterminate where the end is not known. */
export function bar(step, maxSteps, label) {
  const known = maxSteps > 0;
  return el("progress", {
    max: known ? maxSteps : null,
    value: known ? Math.min(step, maxSteps) : null,
    "aria-label": label,
  });
}
