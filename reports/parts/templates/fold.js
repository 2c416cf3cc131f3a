// Folded sections: a link into one opens it, one button opens all, and paper shows all.
"use strict";
(() => {
  const all = [...document.querySelectorAll("details")];

  function show() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let at = target; at; at = at.parentElement) if (at.matches("details")) at.open = true;
    target?.scrollIntoView();
  }

  const button = document.createElement("button");
  button.type = "button";
  button.className = "open-all";

  function label() {
    button.textContent = all.every((each) => each.open) ? "Close all" : "Open all";
  }

  button.addEventListener("click", () => {
    const open = !all.every((each) => each.open);
    for (const each of all) each.open = open;
  });
  for (const each of all) each.addEventListener("toggle", label);
  label();
  document.querySelector("details.section")?.before(button);

  let closed = [];
  addEventListener("beforeprint", () => {
    closed = all.filter((each) => !each.open);
    for (const each of closed) each.open = true;
  });
  addEventListener("afterprint", () => { for (const each of closed) each.open = false; });
  addEventListener("hashchange", show);
  if (location.hash) show();
})();
