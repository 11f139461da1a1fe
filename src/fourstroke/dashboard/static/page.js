// Two things, and the pages work without either: a run that goes on is looked at again, and filters answer as they
// are typed. Parts of the page are replaced by the same parts of a page that the server wrote; no text is ever
// parsed into the document by other means.
"use strict";

async function fetched(address, signal) {
  const answer = await fetch(address, { signal, headers: { accept: "text/html" } });
  if (!answer.ok && answer.status !== 400) return null;
  return new DOMParser().parseFromString(await answer.text(), "text/html");
}

function replace(selector, page) {
  const old = document.querySelector(selector);
  const made = page.querySelector(selector);
  if (old && made) old.replaceWith(document.adoptNode(made));
  return Boolean(old && made);
}

let asked = null;

async function filter(form) {
  const wanted = new URLSearchParams();
  for (const [name, value] of new FormData(form)) if (value !== "") wanted.append(name, value);
  const address = `${location.pathname}?${wanted}`;
  if (asked) asked.abort();
  asked = new AbortController();
  try {
    const page = await fetched(address, asked.signal);
    if (!page) return;
    const target = form.dataset.filter || "#results";
    if (replace(target, page)) history.replaceState(null, "", address);
    else {
      const problem = page.querySelector(".problem");
      const place = document.querySelector(target);
      if (problem && place) place.replaceChildren(document.adoptNode(problem));
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
}

let timer = 0;
document.addEventListener("input", (event) => {
  const form = event.target.closest("form[data-filter]");
  if (!form) return;
  clearTimeout(timer);
  timer = setTimeout(filter, event.target.matches("input[type=text], input[type=number]") ? 100 : 0, form);
});

function isBusy() {
  const active = document.activeElement;
  return document.hidden || (active && active.closest("main form")) || String(getSelection()) !== "";
}

async function look() {
  if (!isBusy()) {
    const page = await fetched(location.href).catch(() => null);
    if (page && !isBusy()) {
      const focused = document.activeElement && document.activeElement.getAttribute("href");
      const chosen = [...document.querySelectorAll("main input:checked")].map((box) => box.value);
      replace("main", page);
      for (const box of document.querySelectorAll("main input[type=checkbox]")) {
        if (chosen.includes(box.value)) box.checked = true;
      }
      if (focused) {
        const again = [...document.querySelectorAll("main a")].find((link) => link.getAttribute("href") === focused);
        if (again) again.focus({ preventScroll: true });
      }
      document.body.dataset.refresh = page.body.dataset.refresh;
    }
  }
  lookLater();
}

function lookLater() {
  const seconds = Number(document.body.dataset.refresh);
  if (seconds > 0) setTimeout(look, seconds * 1000);
}
lookLater();
