// "Leave with the truth": the command or the Python that does it again, to be copied.

import { h } from "./dom.js";
import { t } from "./words.js";

let unfolded = false; // a view that is drawn again while one reads stays as one left it

export function doAgain(...texts) {
  const given = texts.filter(Boolean);
  return h("details", {
    className: "again",
    open: unfolded,
    ontoggle: (event) => { unfolded = event.target.open; },
  }, h("summary", {}, t("Do it again")), given.map((text) => [
    h("pre", {}, text),
    h("button", {
      className: "plain",
      onclick: async (event) => {
        if (await copied(text)) event.target.textContent = t("Copied");
        else getSelection().selectAllChildren(event.target.previousSibling); // for Ctrl-C
      },
    }, t("Copy")),
  ]));
}

// Browsers let a page copy only from this machine or over https.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

export function lede(sentence, ...equations) {
  return h("div", { className: "lede" }, h("span", {}, sentence), equations);
}
