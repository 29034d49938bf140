"""The report that `radixcache bench` writes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from docs.pictures.camera import shoot_looks, window
from radixcache.runtime import cli


def take(folder: Path) -> None:
    """Run the benchmark as it is without arguments, and look at its page."""
    with tempfile.TemporaryDirectory() as place, window() as page:
        written = Path(place, "report.html")
        assert cli.main(["bench", "--report", str(written)]) == 0
        page.driver.get(written.as_uri())
        page.until(lambda: page.all("figure svg"))
        shoot_looks(page, folder, "report", "#w2")
