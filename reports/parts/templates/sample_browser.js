// Samples of a page: searched, filtered and sorted, a few at a time. What others wrote is only ever
// set as text, never as markup.
"use strict";
(() => {
  const AT_ONCE = 5;
  const CHANGES = { better: "better", worse: "worse", failing: "both lose", unchanged: "unchanged" };
  const SORTS = {
    order: ["order of the data", null],
    score: ["reward model's score", (side) => side.score],
    gain: ["score - reference's score", (side, post) => less(side.score, post.reference?.score)],
    kl: ["KL from SFT", (side) => side.kl],
    length: ["length", (side) => side.tokens ?? words(side.text)],
  };

  const words = (text) => text.trim().split(/\s+/).filter(Boolean).length;
  const known = (value) => value !== null && value !== undefined;
  const less = (one, other) => (known(one) && known(other) ? one - other : null);
  const number = (value) => (Object.is(value, -0) ? 0 : value).toFixed(2);

  function make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children.filter(known));
    return element;
  }

  // The text with every place that a search has found marked.
  function marked(text, sought) {
    const parts = document.createDocumentFragment();
    let end = 0;
    for (const found of sought ? text.matchAll(sought) : []) {
      parts.append(text.slice(end, found.index), make("mark", {}, found[0]));
      end = found.index + found[0].length;
    }
    parts.append(text.slice(end));
    return parts;
  }

  const escaped = (text) => text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");

  function start(root) {
    const data = JSON.parse(root.querySelector("script").textContent);
    const verdicts = {
      won: `preferred to ${data.against}`,
      even: `even with ${data.against}`,
      lost: `${data.against} is preferred`,
      unjudged: "unjudged",
    };
    const now = { sought: [], side: data.shown, verdict: "", change: "", sort: "order", from: 0 };
    const compares = data.posts.some((post) => post.sides.some((side) => side.change));
    const texts = data.posts.map((post) =>
      [post.id, post.post, post.reference?.text, ...post.sides.flatMap(
        (side) => [side.text, ...side.said.map((one) => one.text)])].filter(known).join("\n"));

    // -- controls

    const search = make("input", { type: "search", autocomplete: "off", spellcheck: "false" });
    const side = make("select", {});
    const verdict = make("select", {});
    const change = make("select", {});
    const sort = make("select", {});
    const down = make("input", { type: "checkbox", checked: "" });
    const status = make("p", { role: "status" });
    const list = make("div", { class: "found" });
    const earlier = make("button", { type: "button" }, "Previous");
    const later = make("button", { type: "button" }, "Next");
    const place = make("p", {});
    const label = (text, field) => make("label", {}, text, field);
    const form = make("form", { role: "search", "aria-label": "Samples" },
      label("Search", search), label("Policy", side), label("Verdict", verdict),
      compares ? label(`Against ${data.sides[0]}`, change) : null, label("Sort by", sort),
      make("label", { class: "check" }, down, "largest first"));

    function choices(field, options, chosen) {
      field.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
      field.value = options.some(([value]) => value === chosen) ? chosen : options[0][0];
    }

    function counted(names, key) {
      const counts = {};
      for (const post of data.posts) {
        const value = post.sides[now.side][key];
        counts[value] = (counts[value] || 0) + 1;
      }
      return Object.entries(names)
        .filter(([value]) => counts[value])
        .map(([value, text]) => [value, `${text} (${counts[value]})`]);
    }

    // What can be chosen depends on the policy, whose numbers may not all be known.
    function offer() {
      choices(verdict, [["", "any"], ...counted(verdicts, "verdict")], now.verdict);
      const changes = { ...CHANGES, unjudged: "unjudged" };
      choices(change, [["", "any"], ...counted(changes, "change")], now.change);
      const sorts = Object.entries(SORTS).filter(([, [, of]]) =>
        of === null || data.posts.some((post) => known(of(post.sides[now.side], post))));
      choices(sort, sorts.map(([value, [text]]) => [value, text]), now.sort);
      [now.verdict, now.change, now.sort] = [verdict.value, change.value, sort.value];
    }

    // -- what is found

    function found() {
      const of = SORTS[now.sort][1];
      const numbers = data.posts.map((_, number) => number).filter((number) => {
        const one = data.posts[number].sides[now.side];
        return (!now.verdict || one.verdict === now.verdict)
          && (!now.change || one.change === now.change)
          && now.sought.every((word) => texts[number].search(word) >= 0);
      });
      if (of === null) return numbers;
      const value = (number) => of(data.posts[number].sides[now.side], data.posts[number]);
      const sign = down.checked ? -1 : 1;
      return numbers.sort((one, other) => {
        const [a, b] = [value(one), value(other)];
        if (!known(a) || !known(b)) return known(b) - known(a);
        return sign * (a - b) || one - other;
      });
    }

    function facts(one) {
      const length = known(one.tokens) ? `${one.tokens} tokens` : `${words(one.text)} words`;
      return [
        known(one.score) ? `RM score ${number(one.score)}` : null,
        length,
        known(one.kl) ? `KL ${number(one.kl)} nats` : null,
        one.ends === false ? "cut at the limit" : null,
      ].filter(known).join(", ");
    }

    function sentence(one, sought) {
      const preferred = { policy: "prefers it", reference: `prefers ${data.against}` };
      const verdict = preferred[one.prefers] || (one.prefers === "tie" ? "a tie" : "no verdict");
      return make("li", {}, `Shown as ${one.shown}, ${verdict}: `, marked(one.text.trim(), sought));
    }

    function card(name, one, sought) {
      const text = one.text.trim() ? marked(one.text, sought) : "(empty)";
      const said = one.said?.length
        ? make("ul", { class: "said", "aria-label": `What the judge said of ${name}` },
            ...one.said.map((each) => sentence(each, sought)))
        : null;
      const told = [verdicts[one.verdict], one.change && CHANGES[one.change]
        ? `${CHANGES[one.change]}, against ${data.sides[0]}` : null];
      const kind = name.toLowerCase().replace(/[^a-z]+/g, "-");
      return make("div", { class: `summary ${kind}` }, make("h4", {}, name), make("p", {}, text),
        one.verdict ? make("p", { class: "verdict" }, told.filter(Boolean).join("; ")) : null,
        make("p", { class: "facts" }, facts(one)), said);
    }

    function article(index, sought) {
      const post = data.posts[index];
      const title = `Post ${index + 1}`;
      const cards = post.sides.map((one, at) => card(data.sides[at], one, sought));
      if (post.reference) cards.unshift(card("Reference", post.reference, sought));
      return make("article", { class: "sample" },
        make("h3", { tabindex: "-1" }, `${title} `, make("small", {}, post.id)),
        post.post === null ? null : make("div",
          { class: "post", role: "region", "aria-label": title, tabindex: "0" },
          marked(post.post, sought)),
        make("div", { class: "summaries" }, ...cards));
    }

    function show() {
      const numbers = found();
      now.from = Math.max(0, Math.min(now.from, numbers.length - 1));
      now.from -= now.from % AT_ONCE;
      const some = numbers.slice(now.from, now.from + AT_ONCE);
      const sought = now.sought.length
        ? new RegExp(now.sought.map((one) => one.source).join("|"), "giu") : null;
      list.replaceChildren(...some.map((index) => article(index, sought)));
      status.textContent = `${numbers.length} of ${data.posts.length} posts`
        + (numbers.length ? "" : ": nothing fits all of these choices");
      place.textContent = numbers.length ? `${now.from + 1} to ${now.from + some.length}` : "none";
      earlier.disabled = now.from === 0;
      later.disabled = now.from + AT_ONCE >= numbers.length;
    }

    function turn(step) {
      now.from += step * AT_ONCE;
      show();
      list.querySelector("h3")?.focus();
    }

    function changed() {
      now.sought = search.value.split(/\s+/).filter(Boolean)
        .map((word) => new RegExp(escaped(word), "iu"));
      now.side = Number(side.value);
      [now.verdict, now.change, now.sort] = [verdict.value, change.value, sort.value];
      now.from = 0;
      offer();
      show();
    }

    choices(side, data.sides.map((name, at) => [String(at), name]), String(now.side));
    offer();
    form.addEventListener("input", changed);
    form.addEventListener("submit", (event) => event.preventDefault());
    earlier.addEventListener("click", () => turn(-1));
    later.addEventListener("click", () => turn(1));
    const pager = make("div", { class: "pager" }, earlier, place, later);
    root.querySelector(".few").replaceWith(form, status, list, pager);
    show();
  }

  for (const root of document.querySelectorAll(".sample-browser")) start(root);
})();
