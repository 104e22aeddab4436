// Selects the page by the URL's fragment, updates the header and asks for the token.

import {openCompare} from "./compare_page.js";
import {el, setText} from "./dom.js";
import {openJob} from "./job_page.js";
import {openJobs} from "./jobs_page.js";
import {openMachine} from "./machine_page.js";
import {Fault, get, hasToken, onLink, useToken} from "./server.js";
import {openTable} from "./table_page.js";
import {openTeachers} from "./teachers_page.js";

const content = document.getElementById("content");
const link = document.getElementById("link");
const accessButton = document.getElementById("access");
const dialog = document.getElementById("token");
let close = () => {};
let turn = 0;

/** Returns the function that opens the page of `#/`, `#/teachers`, `#/machine`, `#/table`, `#/jobs/ID` or
 *  `#/compare/ID,ID`. */
function pageOf(hash) {
  const [, first, second] = hash.split("/");
  if (first === "teachers") return openTeachers;
  if (first === "machine") return openMachine;
  if (first?.startsWith("table")) return openTable;
  if (first === "compare" && second) {
    return (root) => openCompare(root, second.split(",").map(decoded));
  }
  if (first === "jobs" && second) {
    return (root, access) => openJob(root, decoded(second), access);
  }
  return openJobs;
}

/** Returns the text of a part of the URL, unchanged if it has an invalid escape such as `%zz`. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

async function show() {
  close();
  close = () => {};
  markPage();
  turn += 1;
  const mine = turn;
  try {
    const access = await get("api/access");
    if (mine !== turn) return; // the user has opened another page meanwhile
    tellAccess(access);
    content.replaceChildren();
    close = pageOf(location.hash)(content, access);
  } catch (error) {
    showFault(error);
  }
}

function markPage() {
  const page = ["#/teachers", "#/machine"].find((name) => location.hash.startsWith(name)) ?? "#/";
  for (const anchor of document.querySelectorAll("nav a")) {
    if (anchor.getAttribute("href") === page) anchor.setAttribute("aria-current", "page");
    else anchor.removeAttribute("aria-current");
  }
}

function tellAccess({asks_tokens: asksTokens, role}) {
  setText(accessButton, asksTokens ? `token: ${role}` : "read-only");
  accessButton.disabled = !asksTokens;
  accessButton.title = asksTokens
    ? "Enter another token"
    : "This server has no tokens, so its dashboard is read-only. To allow changes, start the server"
      + " with --token-file.";
}

function showFault(error) {
  const refused = error instanceof Fault && error.status === 401;
  const sentence = error instanceof Fault ? error.sentence : "the server does not answer";
  content.replaceChildren(
    el("div", {class: "notice", role: "alert"},
      el("p", {}, refused ? refusal() : sentence),
      el("button", {type: "button", click: refused ? askToken : show},
        refused ? "Enter a token" : "Try again")),
  );
  if (refused) {
    setText(accessButton, hasToken() ? "token refused" : "no token");
    accessButton.disabled = false;
    askToken(null);
  }
}

function refusal() {
  return hasToken() ? "The server does not accept this token; enter another one." : "This server requires a token.";
}

function askToken(event) {
  const roles = "A token with role read shows jobs; cancel and resume need role submit.";
  setText(document.getElementById("token-why"), event || !hasToken() ? roles : `${refusal()} ${roles}`);
  document.getElementById("token-field").value = "";
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
}

accessButton.addEventListener("click", askToken);
dialog.addEventListener("close", () => {
  const field = document.getElementById("token-field");
  const typed = field.value.trim();
  field.value = "";
  if (dialog.returnValue === "forget") useToken("");
  else if (dialog.returnValue === "use" && typed) useToken(typed);
  else return;
  show();
});
onLink((up) => {
  setText(link, up ? "connected" : "server not reached");
  link.classList.toggle("down", !up);
});
window.addEventListener("hashchange", () => {
  show();
  content.focus();
});
show();
