// Creates DOM elements. Strings become text nodes, never markup: no code of the dashboard parses
// HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Creates an HTML element: `el("a", {href: "#/"}, "Jobs")`. Attributes that are null or false are
 *  left out; functions become event listeners. */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Creates an SVG element; arguments as in `el`. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined));
  return element;
}

/** Sets the text only if it differs, so that the selection and a screen reader's position stay. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Creates a coloured label with a job's state. */
export function badge(state) {
  return el("span", {class: `badge ${state.toLowerCase()}`}, state.toLowerCase());
}

/** Creates a link to a job's page. */
export function jobLink(id, text) {
  return el("a", {href: `#/jobs/${encodeURIComponent(id)}`}, text);
}

/** Creates a region for contents that may be wider than the page: it scrolls, also with the keyboard. */
export function scrollRegion(name, kind, ...children) {
  return el("div", {class: `wide ${kind}`.trim(), role: "region", "aria-label": name, tabindex: 0}, ...children);
}

/** Returns the parts of a text, with a visible mark before each line break. */
export function markLineBreaks(text) {
  return text.split("\n").flatMap((part, index) => (index ? [el("i", {}, "\\n"), "\n", part] : [part]));
}

/** Creates a progress bar, indeterminate if `maxSteps` is 0 (unknown). */
export function bar(step, maxSteps, label) {
  const known = maxSteps > 0;
  return el("progress", {
    max: known ? maxSteps : null,
    value: known ? Math.min(step, maxSteps) : null,
    "aria-label": label,
  });
}

/** Returns the value of a colour of style.css, such as `--soft`. */
export function colourOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
