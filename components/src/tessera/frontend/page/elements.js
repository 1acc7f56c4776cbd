// The page's own elements. Text goes in as text only: the page's policy refuses strings as HTML.

const page = Object.fromEntries([...document.querySelectorAll("[id]")].map((element) => [element.id, element]));

/** make("p", {className: "quiet"}, "text", otherElement): an element with properties and children. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("aria-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** Rows of a definition list, from [term, description] pairs. */
function define(list, pairs) {
  list.replaceChildren(...pairs.map(([term, text]) => make("div", {}, make("dt", {}, term), make("dd", {}, text))));
}

const whole = new Intl.NumberFormat("en");

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${count.toLocaleString("en", { maximumFractionDigits: count < 10 && unit ? 1 : 0 })} ${units[unit]}`;
}

const milliseconds = (value) => `${value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 })} ms`;
