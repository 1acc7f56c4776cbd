// What the service says of itself, asked again every two seconds while somebody looks.

const EVERY = 2000;

let answered;
// What the first answer shows stands above the search and moves it: a click meanwhile would miss its button.
const firstAnswer = new Promise((resolve) => (answered = resolve));

async function refresh() {
  try {
    const health = await (await call("health")).json();
    try {
      // First, because it says whether the model takes pictures at all.
      if (page["key-form"].hidden) showStatus(await readJson("status"));
    } finally {
      showHealth(health);
    }
  } catch (error) {
    if (error.status === 401) {
      askForKey();
    } else {
      showPill("down", "Not reachable");
      page["service-state"].textContent = error.message;
    }
  } finally {
    answered();
  }
}

function showPill(state, text) {
  page.health.className = `pill ${state}`;
  // Said again on every change only: it is read aloud.
  if (page.health.textContent !== text) page.health.textContent = text;
}

const total = (counts) => Object.values(counts).reduce((sum, number) => sum + number, 0);

function showHealth(health) {
  const count = total(health.workers);
  const missing = total(health.missing);
  if (health.status !== "ready") showPill("down", "No worker is ready");
  else if (!health.images && service.images) showPill("down", "Ready for text only");
  else if (missing) showPill("down", `Ready, ${missing} of ${count + missing} workers missing`);
  else showPill("ready", `Ready, ${count} worker${count > 1 ? "s" : ""}`);
}

/** The model that was chosen; before that the first that this page can search with. */
function chosen({ models }) {
  return models.find(({ model }) => model === service.chosen) ?? models.find(({ output }) => output.kind === "vector") ?? models[0];
}

function offerModels(models) {
  page["choose-model"].hidden = models.length < 2;
  const names = models.map(({ model }) => model);
  const offered = [...page["model-choice"].options].map(({ value }) => value);
  if (names.join("\n") !== offered.join("\n")) {
    page["model-choice"].replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  }
}

function showStatus(all) {
  const status = chosen(all);
  offerModels(all.models);
  if (!status) {
    page["service-state"].textContent = Object.entries(all.waiting).map(([name, why]) => `${name} ${why}`).join("; ") || "No model is served.";
    return;
  }
  page["model-choice"].value = status.model;
  if (service.known && service.model !== status.model) forgetVectors();
  service.model = status.model;
  service.images = status.images;
  page.model.textContent = `: ${status.model}`;
  page.family.textContent = `Family ${status.family}: output ${status.output.kind}, ${whole.format(status.output.width)} wide; takes ${status.images ? "text and pictures" : "text alone"}.`;
  const { kind } = status.output;
  page["notice-text"].hidden = status.images || kind !== "vector";
  page["notice-tokens"].hidden = kind !== "tokens";
  page["notice-score"].hidden = kind !== "score";
  page["notice-sparse"].hidden = kind !== "sparse";
  // A search by what this model gives would show an order that means nothing, or an error.
  page.search.hidden = page.pictures.hidden = kind !== "vector";
  page["notice-demo"].hidden = status.checkpoint !== "demo";
  page["notice-random"].hidden = status.checkpoint !== "random";
  const { workers } = status;
  page["service-state"].textContent = workers.length
    ? "Since this frontend was started:"
    : "No worker has joined yet.";
  define(page.counters, [
    ["requests in flight", whole.format(all.frontend.requests_in_flight)],
    ["text tokens", whole.format(status.tokens.text ?? 0)],
    ["image tokens", whole.format(status.tokens.image ?? 0)],
    ["from the cache", whole.format(status.tokens.cached ?? 0)],
  ]);
  page.workers.replaceChildren(...workers.map(workerCard));
  if (!service.known || stalled) {
    service.known = true;
    if (stalled) page.failures.replaceChildren();
    embedPictures();
    searchDelayed();
  }
}

const ROLES = { agg: "Both stages", encode: "Encode worker", embed: "Embed worker" };
const UNITS = { text: "tokens", vision: "units" };

function workerCard({ instance, role, dtype, state }) {
  const list = make("dl");
  define(list, state ? rows(state) : [["state", "did not answer"]]);
  return make("li", {}, make("strong", {}, ROLES[role] ?? role), make("span", { className: "quiet" }, `${instance}, ${dtype}`), list);
}

function rows({ queued, cache, slab }) {
  const found = Object.entries(queued).map(([stage, size]) => [
    `${stage} queue`,
    `${whole.format(size)} ${UNITS[stage] ?? ""}`,
  ]);
  if (cache) {
    const asked = cache.hits + cache.misses;
    found.push(["cache", `${bytes(cache.nbytes)} of ${bytes(cache.capacity_bytes)}`]);
    found.push(["cached images", whole.format(cache.entries)]);
    found.push(["cache hits", asked ? `${Math.round((100 * cache.hits) / asked)} % of ${whole.format(asked)}` : "none asked"]);
  }
  if (slab) found.push(["hand-off memory", `${bytes(slab.used_bytes)} of ${bytes(slab.capacity_bytes)}`]);
  return found;
}

page["model-choice"].addEventListener("change", () => {
  service.chosen = page["model-choice"].value;
  refresh();
});

function askForKey() {
  const first = page["key-form"].hidden;
  page["key-error"].textContent = service.key ? "The service does not know this key." : "";
  page["key-form"].hidden = false;
  if (first && document.activeElement === document.body) page.key.focus();
}

page["key-form"].addEventListener("submit", async (event) => {
  event.preventDefault();
  service.key = page.key.value.trim();
  page["key-form"].hidden = true;
  await refresh();
  if (page["key-form"].hidden) {
    page.key.value = "";
    page.text.focus();
  } else {
    page.key.focus();
  }
});

async function follow() {
  for (;;) {
    if (document.visibilityState === "visible") await refresh();
    await sleep(EVERY);
  }
}
