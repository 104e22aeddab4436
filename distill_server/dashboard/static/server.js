// Sends requests to the server. The token is stored for this tab only and is sent in a header.

const KEY = "distill-token";
const PAUSE = {first: 500, longest: 10000};
// The server sends at least a comment every 15 seconds, so longer silence means a lost connection.
const SILENCE_MS = 45000;

let token = sessionStorage.getItem(KEY) ?? "";
const listeners = new Set();

/** An error response of the server, with its code, message, field and hint. */
export class Fault extends Error {
  constructor(status, {code = "", message = "", hint = "", field = ""} = {}) {
    super(message || `the server answered ${status}`);
    this.status = status;
    this.code = code;
    this.hint = hint;
    this.field = field;
  }

  /** The field, message and hint in one line. */
  get sentence() {
    const where = this.field ? `${this.field}: ` : "";
    return this.hint ? `${where}${this.message}; ${this.hint}` : where + this.message;
  }
}

/** Sets the token for all further requests; "" removes it. */
export function useToken(value) {
  token = value;
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** Returns whether requests have a token. */
export function hasToken() {
  return token !== "";
}

/** Registers a listener: called with true after each response, with false if there is none. */
export function onLink(listener) {
  listeners.add(listener);
}

/** Sends a GET request and returns the JSON of the response; throws Fault for an error response. */
export function get(path) {
  return ask(path, {});
}

/** Sends `wish` as JSON in a POST request; otherwise as `get`. */
export function post(path, wish) {
  const headers = {"Content-Type": "application/json"};
  return ask(path, {method: "POST", headers, body: JSON.stringify(wish)});
}

async function ask(path, options) {
  return (await request(path, options)).json();
}

async function request(path, options) {
  const headers = {...options.headers};
  if (token) headers.Authorization = `Bearer ${token}`;
  let response;
  try {
    response = await fetch(path, {...options, headers, cache: "no-store", credentials: "omit"});
  } catch (error) {
    if (error.name !== "AbortError") tellLink(false);
    throw error;
  }
  tellLink(true);
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  throw new Fault(response.status, told.error);
}

function tellLink(up) {
  for (const listener of listeners) listener(up);
}

/** Follows server-sent events. After a lost connection it reconnects and resumes after the last
 *  event. A hidden tab holds no connection: browsers allow few, and catching up is cheap.
 *
 *  `on` has one function per kind of event; `on.fault` is called with an error that a retry cannot
 *  fix. Returns the function that ends the stream. */
export function follow(path, on) {
  const state = {lastId: "", closed: false, abort: null};
  const hide = () => document.hidden && state.abort?.abort();
  document.addEventListener("visibilitychange", hide);
  keepFollowing(path, on, state);
  return () => {
    state.closed = true;
    document.removeEventListener("visibilitychange", hide);
    state.abort?.abort();
  };
}

async function keepFollowing(path, on, state) {
  let pause = PAUSE.first;
  while (!state.closed) {
    await shown();
    if (state.closed) return;
    state.abort = new AbortController();
    try {
      const headers = state.lastId ? {"Last-Event-ID": state.lastId} : {};
      const response = await request(path, {headers, signal: state.abort.signal});
      pause = PAUSE.first;
      if (await read(response.body, on, state)) return;
      tellLink(false);
    } catch (error) {
      if (error instanceof Fault && error.status < 500) {
        if (!state.closed) on.fault?.(error);
        return;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(2 * pause, PAUSE.longest);
  }
}

/** Reads events until the connection ends; returns true if the stream is complete or was closed. */
async function read(body, on, state) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const watchdog = setTimeout(() => state.abort.abort(), SILENCE_MS);
    const {value, done} = await reader.read().finally(() => clearTimeout(watchdog));
    if (done) return false;
    const blocks = (waiting + value).split("\n\n");
    waiting = blocks.pop();
    for (const block of blocks) {
      const {id, event, data} = fields(block);
      if (state.closed) return true;
      if (id) state.lastId = id;
      if (event === "fault") throw new Fault(data.code === "UNAVAILABLE" ? 503 : 400, data);
      if (event) on[event]?.(data);
      if (event === "over") return true;
    }
  }
}

function fields(block) {
  const found = {};
  for (const line of block.split("\n")) {
    const colon = line.indexOf(": ");
    if (colon > 0) found[line.slice(0, colon)] = line.slice(colon + 2);
  }
  return {...found, data: found.data === undefined ? null : JSON.parse(found.data)};
}

function shown() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", resolve, {once: true});
  });
}

/** Calls `look` every `seconds` while the tab is visible. Returns the function that ends it. */
export function repeat(seconds, look) {
  let timer = 0;
  let closed = false;
  const again = async () => {
    await shown();
    if (closed) return;
    await look();
    if (!closed) timer = setTimeout(again, seconds * 1000);
  };
  again();
  return () => {
    closed = true;
    clearTimeout(timer);
  };
}
