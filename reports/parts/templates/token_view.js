// Episodes through training, each token coloured by one of its numbers. Texts are only ever
// set as text, never as markup.
"use strict";
(() => {
  const ALL_MEASURES = {
    log_ratios: ["log-ratio", "log-ratio to the reference policy, nats"],
    advantages: ["advantage", "advantage, whitened where the stage does so"],
    values: ["value", "value by the critic before the token"],
    rewards: ["reward", "reward of the token: KL penalty, and the score at the end"],
  };
  const STRONG = 0.95; // this share of all tokens is no stronger than the strongest colour
  const FAINT = 0.05; // below it a token has no colour
  const KEYS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  const EDGES = { Home: 0, End: -1 };
  const END = "\u25a0 end";

  const known = (value) => value !== null && value !== undefined;

  function signed(value) {
    if (!known(value)) return "none";
    const size = Math.abs(value);
    const told = size < 0.001 && size > 0 ? size.toExponential(1) : size.toFixed(size < 1 ? 3 : 2);
    return `${value < 0 ? "\u2212" : "+"}${told}`;
  }

  function make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children.filter(known));
    return element;
  }

  function start(root, place) {
    const { episodes } = JSON.parse(root.querySelector("script").textContent);
    const steps = [...new Set(episodes.map((one) => one.step))].sort((a, b) => a - b);
    const MEASURES = Object.fromEntries(
      Object.entries(ALL_MEASURES).filter(([key]) => episodes.some((one) => one[key])));
    const strongest = {};
    for (const key of Object.keys(MEASURES)) {
      const all = episodes.flatMap((one) => one[key] || []).filter(known).map(Math.abs);
      all.sort((a, b) => a - b);
      strongest[key] = all[Math.floor(STRONG * (all.length - 1))] || 1;
    }
    let measure = Object.keys(MEASURES)[0];
    let at = steps.length - 1;

    function color(element, value) {
      const heat = known(value) ? Math.min(1, Math.abs(value) / strongest[measure]) : 0;
      element.classList.toggle("up", heat >= FAINT && value > 0);
      element.classList.toggle("down", heat >= FAINT && value < 0);
      element.style.setProperty("--heat", heat.toFixed(3));
    }

    // Reading on: the score stands after the last token, where there is no token.
    function pieces(one) {
      const texts = one.tokens.map((text) => text.replaceAll("\n", "\u21b5\n"));
      return (one.rewards ?? []).length > texts.length ? [...texts, END] : texts;
    }

    function numbers(one, index) {
      return Object.entries(MEASURES)
        .map(([key, [name]]) => (known(one[key]?.[index]) ? `${name} ${signed(one[key][index])}` : null))
        .filter(known).join(", ");
    }

    function tokensOf(one, title) {
      const reading = make("p", { class: "reading", "aria-hidden": "true" });
      const box = make("div",
        { class: "tokens", role: "listbox", "aria-orientation": "horizontal", "aria-label": title });
      const texts = pieces(one);
      const spans = texts.map((text, index) => {
        const kind = index < one.tokens.length ? "token" : "token end";
        const span = make("span", { class: kind, role: "option", tabindex: index ? "-1" : "0" }, text);
        const name = text.trim() || "space";
        const [word] = MEASURES[measure];
        span.setAttribute("aria-label", `${name}: ${word} ${signed(one[measure]?.[index])}`);
        span.setAttribute("aria-selected", "false");
        color(span, one[measure]?.[index]);
        const read = () => { reading.textContent = `\u201c${text}\u201d: ${numbers(one, index)}`; };
        span.addEventListener("mouseenter", read);
        span.addEventListener("focus", () => {
          for (const other of spans) {
            other.tabIndex = other === span ? 0 : -1;
            other.setAttribute("aria-selected", String(other === span));
          }
          read();
        });
        return span;
      });
      box.append(...spans);
      box.addEventListener("keydown", (event) => {
        const index = spans.indexOf(event.target);
        let next = null;
        if (event.key in KEYS) next = spans[index + KEYS[event.key]];
        if (event.key in EDGES) next = spans.at(EDGES[event.key]);
        if (event.key in KEYS || event.key in EDGES) event.preventDefault();
        next?.focus();
      });
      return [box, reading];
    }

    function article(one, index) {
      const title = `Episode ${index + 1} of update ${one.step}`;
      const facts = `score ${signed(one.score)}, KL ${signed(one.kl)} nats`;
      const post = known(one.query) ? make("details", {}, make("summary", {}, "The post"),
        make("div", { class: "post", role: "region", "aria-label": `Post of ${title}`, tabindex: "0" },
          one.query)) : null;
      return make("article", { class: "sample" }, make("h3", {}, title),
        make("p", { class: "facts" }, facts), ...tokensOf(one, title), post);
    }

    // -- controls

    const list = make("div", {});
    const output = make("output", {});
    const slider = make("input",
      { type: "range", min: "0", max: String(steps.length - 1), step: "1", value: String(at) });
    const update = make("label", { class: "update" }, "Update ", output, slider);
    const key = make("p", { class: "scale" });
    const radios = Object.entries(MEASURES).map(([value, [name]]) => {
      const radio = make("input", { type: "radio", name: `measure-${place}`, value });
      radio.checked = value === measure;
      radio.addEventListener("change", () => { measure = value; show(); });
      return make("label", {}, radio, ` ${name}`);
    });
    const colors = make("fieldset", {}, make("legend", {}, "Colour by"), ...radios);

    function scale() {
      const most = strongest[measure].toPrecision(2);
      const ends = [["down", `\u2212${most} and less`], ["up", `+${most} and more`]];
      const keys = ends.map(([kind, text]) => {
        const one = make("span", { class: `key ${kind}` }, text);
        one.style.setProperty("--heat", "1");
        return one;
      });
      key.replaceChildren(...keys, `${MEASURES[measure][1]}.`);
    }

    function show() {
      const step = steps[at];
      output.textContent = `${step} of ${steps.at(-1)}`;
      slider.setAttribute("aria-valuetext", `update ${step}`);
      scale();
      list.replaceChildren(...episodes.filter((one) => one.step === step).map(article));
    }

    slider.addEventListener("input", () => { at = Number(slider.value); show(); });
    const form = make("form", { "aria-label": "Samples through training" }, update, colors);
    form.addEventListener("submit", (event) => event.preventDefault());
    root.querySelector(".few").replaceWith(form, key, list);
    show();
  }

  document.querySelectorAll(".token-view").forEach(start);
})();
