// Pictures that go with a question: chosen, dropped or pasted. They are sent as they are.

import { $, button, make } from "./dom.js";

const MOST = 20e6; // bytes, which a server takes
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
let urls = []; // of those that wait to be sent

export const isPicture = ({ type }) => TYPES.includes(type);
export const preview = (src) => make("img", { src, alt: "Picture" });
export const waiting = () => urls;

export async function addPicture(file) {
  if (file.size > MOST) throw new Error(`${file.name} is larger than 20 MB`);
  const reader = new FileReader();
  await new Promise((resolve) => { reader.onloadend = resolve; reader.readAsDataURL(file); });
  if (reader.error) throw new Error(`${file.name} cannot be read`);
  setWaiting([...urls, reader.result]);
}

/** Let these wait, in the place of those that did. */
export function setWaiting(pictures) {
  urls = pictures;
  $("pictures").replaceChildren(...urls.map((url, index) => make("li", {}, preview(url), button("×", () => {
    setWaiting(urls.filter((_, other) => other !== index));
    $("question").focus();
  }, { ariaLabel: `Remove picture ${index + 1}` }))));
}

/** What a message says, as the server takes it. */
export function contentOf({ content, pictures = [] }) {
  if (!pictures.length) return content;
  const text = content ? [{ type: "text", text: content }] : [];
  return [...pictures.map((url) => ({ type: "image_url", image_url: { url } })), ...text];
}
