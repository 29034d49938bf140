"""Markdown as the page shows it: what it becomes, what it never becomes, and in what time."""

from __future__ import annotations

from tests.runtime.server.page.browser import Page
from tests.runtime.server.processes import loading

MARKDOWN = {
    "# A\n###### B": "<h3>A</h3><h6>B</h6>",
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "**a *b*** ***c** d* __e__ ~~f~~": "<p><strong>a <em>b</em></strong> <em><strong>c</strong> d"
    "</em> <strong>e</strong> <del>f</del></p>",
    "snake_case_name 2 * 3 * 4 \\*x\\* **open": "<p>snake_case_name 2 * 3 * 4 *x* **open</p>",
    "`a*b*` ``c`d`` `open": "<p><code>a*b*</code> <code>c`d</code> `open</p>",
    "- a\n  - b\n    - c\n- d": "<ul><li><p>a</p><ul><li><p>b</p><ul><li><p>c</p></li></ul></li>"
    "</ul></li><li><p>d</p></li></ul>",
    "3. a\n   > q\n4. b\n\nend": '<ol start="3"><li><p>a</p><blockquote><p>q</p></blockquote></li>'
    "<li><p>b</p></li></ol><p>end</p>",
    "x\n- a\n***\ny\n-z": "<p>x</p><ul><li><p>a</p></li></ul><hr><p>y\n-z</p>",
    "```py\n\ta\n\n  *b*\n```\nc": '<div class="code"><small>py</small><button type="button">Copy'
    "</button><pre><code>\ta\n\n  *b*</code></pre></div><p>c</p>",
    "~~~\n<b>never closed": '<div class="code"><small></small><button type="button">Copy</button>'
    "<pre><code>&lt;b&gt;never closed</code></pre></div>",
    "|a|b|\n|:-|-:|\n|`x`|1|2|\n|y|": '<table><thead><tr><th style="text-align: left;">a</th>'
    '<th style="text-align: right;">b</th></tr></thead><tbody><tr><td style="text-align: left;">'
    '<code>x</code></td><td style="text-align: right;">1</td></tr><tr>'
    '<td style="text-align: left;">y</td></tr></tbody></table>',
    '[**a**](https://b.org/c_(d) "t") [m](mailto:a@b.org)': '<p><a href="https://b.org/c_(d)" '
    'title="https://b.org/c_(d)" target="_blank" rel="noopener"><strong>a</strong></a> '
    '<a href="mailto:a@b.org" title="mailto:a@b.org" target="_blank" rel="noopener">m</a></p>',
    "**https://a.org/b.**": '<p><strong><a href="https://a.org/b" title="https://a.org/b" '
    'target="_blank" rel="noopener">https://a.org/b</a>.</strong></p>',
    "<script>alert(1)</script>\n<img src=x onerror=alert(1)>\n&lt;b&gt;": "<p>&lt;script&gt;"
    "alert(1)&lt;/script&gt;\n&lt;img src=x onerror=alert(1)&gt;\n&amp;lt;b&amp;gt;</p>",
    "# <b>x</b>\n- <i>y</i>": "<h3>&lt;b&gt;x&lt;/b&gt;</h3><ul><li><p>"
    "&lt;i&gt;y&lt;/i&gt;</p></li></ul>",
    **{
        f"[x]({address})": f"<p>[x]({address.replace('&', '&amp;')})</p>"
        for address in (
            "javascript:alert(1)", "JaVaScRiPt:alert(1)", "java\tscript:alert(1)", "/v1/cache",
            "javascript&#58;alert(1)", "data:text/html,x", "vbscript:x", "//evil.org", "",
            "\x01javascript:alert(1)", "file:///etc/passwd",
        )
    },
}  # fmt: skip
"""What becomes of a text. No markup of its own ever becomes an element or a dangerous address."""

HOSTILE = ("> ", "- ", "* a ", "*a ", "**a** ", "_a", "a_ ", "[", "[a](", "](b", "`", "``` ",
           "`` ` ", "|", "|a", "a|b\n-|-\n", "- a\n", "  - a\n ", "~", "\\", "#", "# ", "* ",
           "1. ", "](https://a)", "[[a]](b ", "](x (y) ", "https://", "https://.", "\t", " ", "\n",
           "***", "a\n> ", "```\n", "![a](b)", "<a href=")  # fmt: skip
"""Repeated, each takes time that is linear in its length."""

RENDER = """
const [cases, hostile, done] = arguments;
import("/markdown.js").then(({ markdown }) => {
  const html = (text, step) => {
    const parent = document.createElement("div");
    const show = markdown(parent);
    for (let end = step; end < text.length; end += step) show(text.slice(0, end));
    show(text);
    return parent.innerHTML;
  };
  const time = (text) => {
    const start = performance.now();
    markdown(document.createElement("div"))(text);
    return performance.now() - start;
  };
  const isSlow = (piece) => {
    const [short, long] = [10000, 40000].map((length) => time(piece.repeat(length / piece.length)));
    return long > 10 * short + 200;
  };
  const often = [1, 2, 3, 4, 5]; // something else may compute just then
  const slow = hostile.filter((piece) => often.every(() => isSlow(piece)));
  const shown = (step) => cases.map((text) => html(text, step));
  done({ whole: shown(1e9), grown: shown(1), slow });
});
"""


def test_markdown_is_shown_and_what_is_hostile_is_text(window: Page):
    """Letter by letter or at once, the same comes of it."""
    with loading() as (_, url):
        window.driver.get(url)
        window.driver.set_script_timeout(120)
        found = window.driver.execute_async_script(RENDER, list(MARKDOWN), HOSTILE)
        window.driver.get("about:blank")
    assert dict(zip(MARKDOWN, found["whole"], strict=True)) == MARKDOWN
    assert dict(zip(MARKDOWN, found["grown"], strict=True)) == MARKDOWN
    assert found["slow"] == []
