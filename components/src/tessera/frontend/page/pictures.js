// The pictures to search in: read, embedded in small requests, shown in the order of their scores.

// What the service reads, as the file picker has it.
const READ_TYPES = new Set(page.files.accept.split(","));
// Of files whose type not every browser knows.
const TYPES_OF_ENDINGS = { avif: "image/avif", heic: "image/heic", heif: "image/heif", hif: "image/heif" };
const REQUEST_PICTURES = 8;
const REQUEST_BYTES = 8 << 20;

/** {name, alt, file, url, type, vector, score}; `vector` and `score` are undefined until they are known. */
const pictures = [];
let query;
let embedding;
let stalled = false;

const dataUrl = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("the browser cannot read it"));
    reader.readAsDataURL(file);
  });

const imagePart = (url) => ({ type: "image_url", image_url: { url } });

function fail(name, error) {
  page.failures.append(make("p", {}, `${name}: ${error.message}`));
}

/** The same with the type of its ending, where the browser knows none. */
function typed(entry) {
  const { file } = entry;
  const type = file.type || TYPES_OF_ENDINGS[file.name.split(".").pop().toLowerCase()];
  return type && type !== file.type ? { ...entry, file: new File([file], file.name, { type }) } : entry;
}

/** Take pictures in and embed them; `entries` are {file, name, alt}. */
async function addPictures(entries) {
  page.failures.replaceChildren();
  for (const { file, name, alt } of entries.map(typed)) {
    if (!READ_TYPES.has(file.type)) {
      const names = [...READ_TYPES].map((type) => type.slice("image/".length));
      fail(name, new Error(`none of what is read here: ${names.join(", ")}`));
    } else if (!pictures.some((had) => had.name === name && had.file.size === file.size)) {
      pictures.push({ name, alt: alt ?? name, file, type: file.type, url: URL.createObjectURL(file) });
    }
  }
  showPictures();
  await embedPictures();
}

function removePicture(picture) {
  pictures.splice(pictures.indexOf(picture), 1);
  URL.revokeObjectURL(picture.url);
  showPictures();
}

/** Embed what has no vector yet, request by request; one such loop runs at a time. */
async function embedPictures() {
  if (embedding || !service.known) return;
  const { signal } = (embedding = new AbortController());
  page.progress.hidden = false;
  stalled = false;
  let batch;
  try {
    while ((batch = nextBatch()).length) await embedBatch(batch, signal);
  } catch (error) {
    // What may pass is tried again when the service next says how it is.
    stalled = error.name !== "AbortError";
    if (stalled) fail("Waiting", error);
    if (error.status === 401) askForKey();
  } finally {
    embedding = undefined;
    page.progress.hidden = true;
    showPictures();
  }
  // Pictures that came after "Remove all", while the last answer was still under way.
  if (signal.aborted) await embedPictures();
}

const PASSING = [0, 401, 429, 503, 504];

async function embedBatch(chosen, signal) {
  const read = await Promise.all(chosen.map((picture) => dataUrl(picture.file).catch((error) => error)));
  chosen.forEach((picture, index) => read[index] instanceof Error && settle(picture, read[index]));
  const urls = read.filter((url) => !(url instanceof Error));
  const batch = chosen.filter((_, index) => !(read[index] instanceof Error));
  if (!batch.length) return;
  let answer;
  try {
    answer = await embed(pictureRequest(urls.map(imagePart)), signal);
  } catch (error) {
    if (error.name === "AbortError" || PASSING.includes(error.status)) throw error;
    for (const picture of batch) settle(picture, error);
    return;
  }
  batch.forEach((picture, index) => settle(picture, answer.vectors[index]));
  const named = batch.map((picture) => imagePart({ file: picture.name, type: picture.type }));
  showRequest(pictureRequest(named), answer, `${batch.length} picture${batch.length > 1 ? "s" : ""}`);
  rank();
}

const pictureRequest = (parts) => ({ input: parts.map((part) => [part]), partial: true });

function nextBatch() {
  const batch = [];
  let size = 0;
  for (const picture of pictures) {
    if (picture.vector) continue;
    if (batch.length && (batch.length === REQUEST_PICTURES || size + picture.file.size > REQUEST_BYTES)) break;
    batch.push(picture);
    size += picture.file.size;
  }
  return batch;
}

function settle(picture, vector) {
  if (!(vector instanceof Error)) {
    picture.vector = vector;
  } else if (pictures.includes(picture)) {
    fail(picture.name, vector);
    removePicture(picture);
  }
}

function clearPictures() {
  embedding?.abort();
  while (pictures.length) removePicture(pictures[0]);
  page.failures.replaceChildren();
  page.choose.focus();
}

/** Another model's vectors cannot be compared with those that are here, or under way. */
function forgetVectors() {
  embedding?.abort();
  searching?.abort();
  query = undefined;
  for (const picture of pictures) picture.vector = picture.score = undefined;
  service.known = false;
  showPictures();
}

/** Score what can be scored by the current query, best first; what waits goes last. */
function rank() {
  for (const picture of pictures) {
    picture.score = query && picture.vector ? cosine(query, picture.vector) : undefined;
  }
  if (query) pictures.sort((one, other) => (other.score ?? -2) - (one.score ?? -2));
  showPictures();
}

function showPictures() {
  const done = pictures.filter((picture) => picture.vector).length;
  const ranked = query && done;
  page["pictures-title"].textContent = ranked ? "Pictures, best first" : "Pictures";
  page["pictures-state"].textContent =
    done < pictures.length
      ? `${done} of ${pictures.length} embedded`
      : pictures.length
        ? `${pictures.length} picture${pictures.length > 1 ? "s" : ""} ${ranked ? "ranked" : "ready to search"}`
        : "";
  page.progress.max = pictures.length || 1;
  page.progress.value = done;
  page.clear.hidden = !pictures.length;
  // Elements stay with their pictures, so that the focus stays where it was.
  pictures.forEach((picture, index) => fillCard(picture, index));
  const cards = pictures.map((picture) => picture.card);
  if (cards.some((card, index) => page.results.children[index] !== card) || cards.length !== page.results.children.length) {
    const focused = document.activeElement;
    page.results.replaceChildren(...cards);
    if (focused?.isConnected && focused !== document.activeElement) focused.focus({ preventScroll: true });
  }
}

function fillCard(picture, index) {
  if (!picture.card) picture.card = makeCard(picture);
  const scored = picture.score !== undefined;
  picture.card.className = `card${picture.vector ? "" : " waiting"}${scored && index === 0 ? " best" : ""}`;
  picture.scoreLine.hidden = !scored;
  if (scored) picture.scoreLine.replaceChildren(`${index + 1}.`, make("span", { title: "cosine" }, picture.score.toFixed(3)));
}

function makeCard(picture) {
  picture.scoreLine = make("p", { className: "score", hidden: true });
  const image = make("img", { src: picture.url, alt: picture.alt, decoding: "async" });
  // Not every browser shows every format that the service reads.
  image.addEventListener("error", () => image.replaceWith(make("span", { className: "quiet" }, "no preview")));
  const like = make("button", { type: "button", className: "small", "aria-label": `Similar to ${picture.name}` }, "Similar");
  like.addEventListener("click", () => searchFor({ text: "", picture }));
  const remove = make("button", { type: "button", className: "small", "aria-label": `Remove ${picture.name}` }, "Remove");
  remove.addEventListener("click", () => {
    const next = picture.card.nextElementSibling ?? picture.card.previousElementSibling;
    removePicture(picture);
    (next?.querySelector("button") ?? page.choose).focus();
  });
  return make(
    "li",
    {},
    make("div", { className: "frame" }, image),
    make("div", { className: "about" }, picture.scoreLine, make("p", { className: "name", title: picture.name }, picture.name)),
    make("div", { className: "actions" }, like, remove),
  );
}
