// Charts as files of their own: what the page's style says of each element is written into it.

const STYLE = [
  "fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "paint-order",
  "font-family", "font-size", "font-weight", "font-variant-numeric", "text-anchor",
];

// Mixed colours as every reader of SVG knows them.
function plainColour(value) {
  if (!/^(color|oklab|oklch|lab|lch)\(/.test(value)) return value;
  const pen = make("canvas", { width: 1, height: 1 }).getContext("2d");
  pen.fillStyle = value;
  pen.fillRect(0, 0, 1, 1);
  const [red, green, blue] = pen.getImageData(0, 0, 1, 1).data;
  return `rgb(${red}, ${green}, ${blue})`;
}

function standalone(svg) {
  const copy = svg.cloneNode(true);
  const from = [svg, ...svg.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((element, at) => {
    const style = getComputedStyle(from[at]);
    element.removeAttribute("style");
    for (const name of STYLE) element.setAttribute(name, plainColour(style.getPropertyValue(name)));
    for (const name of ["class", "tabindex", "data-s"]) element.removeAttribute(name);
    if (from[at].classList.contains("cursor")) element.remove();
  });
  const paper = getComputedStyle(document.body).backgroundColor;
  copy.prepend(make("rect", { width: "100%", height: "100%", fill: paper }));
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return new XMLSerializer().serializeToString(copy);
}

function saveButton(svg) {
  const name = svg.getAttribute("aria-label");
  const save = () => {
    const url = URL.createObjectURL(new Blob([standalone(svg)], { type: "image/svg+xml" }));
    const file = `${name.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 100)}.svg`;
    make("a", { href: url, download: file }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  };
  return make("button", { type: "button", class: "save", "aria-label": `Save SVG: ${name}`, onclick: save }, "Save SVG");
}
