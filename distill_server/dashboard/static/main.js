// Which page is shown, what the header says, and the token.

import {el, setText} from "./dom.js";
import {openJob} from "./job_page.js";
import {openJobs} from "./jobs_page.js";
import {Fault, get, onLink, useToken} from "./server.js";
import {openTeachers} from "./teachers_page.js";

const content = document.getElementById("content");
const link = document.getElementById("link");
const accessButton = document.getElementById("access");
const dialog = document.getElementById("token");
let close = () => {};
let turn = 0;

/** `#/`, `#/teachers`, `#/jobs/ID`. */
function pageOf(hash) {
  const [, first, second] = hash.split("/");
  if (first === "teachers") return openTeachers;
  if (first === "jobs" && second) {
    return (root, access) => openJob(root, decodeURIComponent(second), access);
  }
  return openJobs;
}

async function show() {
  close();
  close = () => {};
  markPage();
  turn += 1;
  const mine = turn;
  try {
    const access = await get("/api/access");
    if (mine !== turn) return; // somebody went on meanwhile
    tellAccess(access);
    content.replaceChildren();
    close = pageOf(location.hash)(content, access);
  } catch (error) {
    showFault(error);
  }
}

function markPage() {
  const teachers = location.hash.startsWith("#/teachers");
  for (const anchor of document.querySelectorAll("nav a")) {
    const current = (anchor.getAttribute("href") === "#/teachers") === teachers;
    if (current) anchor.setAttribute("aria-current", "page");
    else anchor.removeAttribute("aria-current");
  }
}

function tellAccess({asks_tokens: asksTokens, role}) {
  setText(accessButton, asksTokens ? `token: ${role}` : "read-only");
  accessButton.disabled = !asksTokens;
  accessButton.title = asksTokens
    ? "Give another token"
    : "This server asks for no tokens, so its dashboard only shows. Start it with --token-file.";
}

function showFault(error) {
  const refused = error instanceof Fault && error.status === 401;
  const sentence = error instanceof Fault ? error.sentence : "the server does not answer";
  content.replaceChildren(
    el("div", {class: "notice", role: "alert"},
      el("p", {}, refused ? "This server asks for a token." : sentence),
      el("button", {type: "button", click: refused ? askToken : show},
        refused ? "Give a token" : "Try again")),
  );
  if (refused) {
    setText(accessButton, "no token");
    accessButton.disabled = false;
    askToken();
  }
}

function askToken() {
  const why = "Reading needs role read; cancel and resume need role submit.";
  setText(document.getElementById("token-why"), why);
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
