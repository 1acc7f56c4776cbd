// Calls to the service this page came from. Addresses are relative, so that a proxy may put both under a path.

const base = new URL(location.pathname.endsWith("/") ? location.pathname : `${location.pathname}/`, location.origin);
const address = (path) => new URL(path, base);

const service = { key: "", model: "", chosen: "", images: true, known: false };

/** A failed call: what the service said, and the HTTP status (0 when it could not be reached). */
class CallFailed extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function call(path, options = {}) {
  const headers = new Headers(options.headers);
  if (service.key) headers.set("authorization", `Bearer ${service.key}`);
  let answer;
  try {
    answer = await fetch(address(path), { ...options, headers, credentials: "same-origin", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallFailed("The service does not answer.", 0);
  }
  return answer;
}

async function failure(answer) {
  let said;
  try {
    said = (await answer.json()).error.message;
  } catch {
    said = `the service answered ${answer.status}`;
  }
  return new CallFailed(said, answer.status);
}

async function readJson(path) {
  const answer = await call(path);
  if (!answer.ok) throw await failure(answer);
  return answer.json();
}

// Errors of single inputs that say something of the service, and nothing of the input.
const PASSING_CODES = new Set(["overloaded", "unavailable", "deadline_exceeded", "engine_dead", "hand_off_failed", "lease_expired", "transport_unavailable"]);

const sleep = (time) => new Promise((resolve) => setTimeout(resolve, time));

/**
 * Embed inputs in the service's own terms.
 *
 * Gives {vectors, usage, stages, elapsed, id}: for each input a Float32Array of unit length or an Error,
 * stages in milliseconds. A service that is full is asked again when it said that it would have room.
 */
async function embed(request, signal) {
  const body = JSON.stringify({ model: service.model, ...request, encoding_format: "base64" });
  const headers = { "content-type": "application/json", "x-tessera-timings": "1" };
  for (let attempt = 1; ; attempt += 1) {
    const started = performance.now();
    const answer = await call("v1/embeddings", { method: "POST", headers, body, signal });
    if (answer.ok) {
      const parsed = await answer.json();
      const passing = parsed.data.find((row) => row.error && PASSING_CODES.has(row.error.code));
      if (passing && attempt < 4) {
        await sleep(1000);
        continue;
      }
      if (passing) throw new CallFailed(passing.error.message, 503);
      return {
        vectors: parsed.data.map((row) => (row.error ? new Error(reason(row.error)) : decode(row.embedding))),
        usage: parsed.usage,
        stages: stages(answer.headers),
        elapsed: performance.now() - started,
        id: answer.headers.get("x-request-id") ?? "",
      };
    }
    const failed = await failure(answer);
    if (attempt === 4 || (answer.status !== 429 && answer.status !== 503)) throw failed;
    const wait = Number(answer.headers.get("retry-after"));
    await sleep(1000 * Math.min(Math.max(wait || 1, 0.2), 10));
  }
}

/** What was wrong, without the input's place in a request that nobody sees. */
const reason = ({ message, param }) => (param && message.startsWith(param) ? message.slice(param.length).replace(/^[: ]+/, "") : message);

const ORDER = ["queue", "preprocess", "encode", "transfer", "embed"];

/** [stage, milliseconds] in the order in which a request passes them; headers come by the alphabet. */
function stages(headers) {
  const found = [];
  for (const [name, value] of headers) {
    const stage = /^x-tessera-([a-z]+)-ms$/.exec(name);
    if (stage) found.push([stage[1], Number(value)]);
  }
  const place = ([stage]) => (ORDER.includes(stage) ? ORDER.indexOf(stage) : ORDER.length);
  return found.sort((one, other) => place(one) - place(other));
}

/** Little-endian float32, whatever this machine's own order is. */
function decode(base64) {
  const raw = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const view = new DataView(raw.buffer);
  return Float32Array.from({ length: raw.length / 4 }, (_, index) => view.getFloat32(4 * index, true));
}

/** The cosine of two unit vectors. */
function cosine(one, other) {
  let sum = 0;
  for (let index = 0; index < one.length; index += 1) sum += one[index] * other[index];
  return sum;
}
