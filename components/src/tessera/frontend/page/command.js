// Requests as commands for a POSIX shell.

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/**
 * The request as curl would send it; files are named where the page has put their bytes.
 *
 * `request` is the body, in which `{file: NAME, type: MEDIA_TYPE}` stands for a data URL.
 */
function curl(request) {
  const lines = [`curl -s ${quote(address("v1/embeddings").href)}`, "-H 'Content-Type: application/json'"];
  if (service.key) lines.push('-H "Authorization: Bearer $TESSERA_API_KEY"');
  const files = [];
  // A mark that the text of a request does not hold.
  const mark = `{${crypto.getRandomValues(new Uint32Array(4)).join("-")}}`;
  const text = JSON.stringify({ model: service.model, ...request }, (_, value) => {
    if (!value || typeof value !== "object" || value.file === undefined) return value;
    files.push(value.file);
    return `data:${value.type};base64,${mark}`;
  });
  const pieces = text.split(mark);
  if (pieces.length === 1) return [...lines, `-d ${quote(text)}`].join(" \\\n  ");
  const parts = pieces.flatMap((piece, index) => [
    ...(index ? [`base64 < ${quote(files[index - 1])} | tr -d '\\n'`] : []),
    `printf '%s' ${quote(piece)}`,
  ]);
  return `{\n  ${parts.join("\n  ")}\n} | ${[...lines, "-d @-"].join(" \\\n  ")}`;
}

/** Show what was asked, what it cost and where the time went. */
function showRequest(request, answer, what) {
  page["request-none"].hidden = true;
  page.request.hidden = false;
  page["request-summary"].textContent = `${what}: ${milliseconds(answer.elapsed)} from here and back`;
  page.curl.textContent = curl(request);
  const details = answer.usage.prompt_tokens_details ?? {};
  define(page.usage, [
    ["text", whole.format(details.text_tokens ?? answer.usage.prompt_tokens)],
    ["image", whole.format(details.image_tokens ?? 0)],
    ["of them from the cache", whole.format(details.cached_tokens ?? 0)],
  ]);
  define(page.timings, answer.stages.map(([stage, time]) => [stage, milliseconds(time)]));
  page["request-id"].textContent = `Request ${answer.id}`;
}

page.copy.addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(page.curl.textContent);
    page.copied.textContent = "Copied.";
    page.copy.textContent = "Copied";
  } catch {
    // The clipboard is closed to pages that came over plain HTTP from another host.
    getSelection().selectAllChildren(page.curl);
    page.copied.textContent = "Selected: press Ctrl-C or ⌘-C.";
    page.copy.textContent = "Selected, press Ctrl-C";
  }
  await sleep(2500);
  page.copy.textContent = "Copy as curl";
});
