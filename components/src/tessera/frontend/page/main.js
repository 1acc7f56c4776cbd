// The query, and where pictures come from: files, drops, the clipboard, the examples.

let asked;
/** Ends the search under way; null before the first. */
let searching = null;
// Somebody was faster than the first answer of the service, or had to look for the key first.
let delayed = false;

function setQueryPicture(picture) {
  // What was chosen for the query alone is shown nowhere else.
  if (asked && !pictures.includes(asked)) URL.revokeObjectURL(asked.url);
  asked = picture;
  page["query-picture"].hidden = !picture;
  page["query-choose"].hidden = Boolean(picture);
  if (picture) {
    page["query-thumbnail"].replaceChildren(make("img", { src: picture.url, alt: "" }));
    page["query-name"].textContent = picture.name;
  }
}

/** Embed the query and rank by it; a search ends the one before it. */
async function search() {
  const text = page.text.value.trim();
  page["search-error"].textContent = "";
  if (!text && !asked) {
    page["search-error"].textContent = "Type a text or add a picture to the query.";
    page.text.focus();
    return;
  }
  if (!service.known) {
    page["search-error"].textContent = "Waiting for the service.";
    delayed = true;
    return;
  }
  searching?.abort();
  const { signal } = (searching = new AbortController());
  const picture = asked;
  try {
    const request = (image) => queryRequest(text, image);
    const answer = await embed(request(picture && (await dataUrl(picture.file))), signal);
    if (answer.vectors[0] instanceof Error) throw answer.vectors[0];
    query = answer.vectors[0];
    showRequest(request(picture && { file: picture.name, type: picture.type }), answer, "The query");
    rank();
    if (!pictures.length) page["search-error"].textContent = "There are no pictures to search in yet.";
  } catch (error) {
    if (signal.aborted) return;
    page["search-error"].textContent = error.message;
    if (error.status === 401) askForKey();
  }
}

function searchDelayed() {
  if (delayed) search();
  delayed = false;
}

/** A text asks as a query; a picture, with or without text, looks for its like and is embedded as they were. */
function queryRequest(text, image) {
  if (!image) return { input: text, input_type: "query" };
  return { input: [text ? [imagePart(image), { type: "text", text }] : [imagePart(image)]] };
}

function searchFor({ text, picture }) {
  page.text.value = text;
  setQueryPicture(picture);
  return search();
}

const named = (files) => [...files].map((file) => ({ file, name: file.name || "pasted picture" }));

page.search.addEventListener("submit", (event) => {
  event.preventDefault();
  search();
});
page["query-choose"].addEventListener("click", () => page["query-file"].click());
page["query-file"].addEventListener("change", () => {
  const [chosen] = page["query-file"].files;
  const file = chosen && typed({ file: chosen }).file;
  if (file) setQueryPicture({ file, name: file.name, type: file.type, url: URL.createObjectURL(file) });
  page["query-file"].value = "";
  page["query-remove"].focus();
});
page["query-remove"].addEventListener("click", () => {
  setQueryPicture(undefined);
  page["query-choose"].focus();
});

page.choose.addEventListener("click", () => page.files.click());
page.files.addEventListener("change", () => {
  addPictures(named(page.files.files));
  page.files.value = "";
});
page.clear.addEventListener("click", clearPictures);
document.addEventListener("dragover", (event) => {
  if (![...event.dataTransfer.types].includes("Files")) return;
  event.preventDefault();
  document.body.classList.add("dragging");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dragging");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dragging");
  addPictures(named(event.dataTransfer.files));
});
document.addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) addPictures(named(event.clipboardData.files));
});

/** The pictures that come with the page, and what to ask for among them. */
async function offerExamples() {
  const answer = await fetch(address("examples/examples.json"));
  if (!answer.ok) return;
  const { pictures: list, queries } = await answer.json();
  await firstAnswer;
  page.examples.hidden = false;
  page.suggestions.hidden = false;
  page["suggestion-list"].replaceChildren(
    ...queries.map((text) => {
      const button = make("button", { type: "button" }, text);
      button.addEventListener("click", async () => {
        if (!pictures.length) await takeExamples(list);
        await searchFor({ text });
      });
      return make("li", {}, button);
    }),
  );
  page.text.placeholder = queries[0];
  page.examples.addEventListener("click", () => takeExamples(list));
}

async function takeExamples(list) {
  page.examples.disabled = true;
  try {
    await addPictures(
      await Promise.all(
        list.map(async ({ file, caption }) => {
          const blob = await (await fetch(address(`examples/${file}`))).blob();
          return { file: blob, name: file, alt: caption };
        }),
      ),
    );
  } catch {
    page["search-error"].textContent = "The examples could not be fetched.";
  } finally {
    page.examples.disabled = false;
  }
}

// The page may have been opened without the slash that relative links need.
page.docs.href = address("docs").href;
follow();
// Without them the page is no worse than before.
offerExamples().catch(() => {});
