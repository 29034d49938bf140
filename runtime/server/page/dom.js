// What every part needs: elements, and numbers as people write them.

export const $ = (id) => document.getElementById(id);
export const format = new Intl.NumberFormat("en");
export const count = (n, noun) => `${format.format(n)} ${noun}${n === 1 ? "" : "s"}`;
export const percent = (share) => `${(100 * share).toFixed(share === 1 ? 0 : 1)} %`;
export const milliseconds = (s) => `${(1000 * s).toFixed(s < 0.0095 ? 1 : 0)} ms`;

/** An element with properties and children; a string child is text, never markup. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export const button = (text, onclick, properties = {}) => make("button", { type: "button", onclick, ...properties }, text);
