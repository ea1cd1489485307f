"""The site is built without a warning and without a network; what scripts make is current."""

import importlib.util
import re
import subprocess
import sys

from tests.docs.pages import ROOT


def test_the_site_is_built_strictly(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    assert 'id="dflash_jax.frontend.llm.LLM.generate"' in page
    loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', page)
    assert not [url for url in loaded if "fonts" in url or "cdn" in url]


def test_the_page_of_flags_is_current():
    spec = importlib.util.spec_from_file_location("flag_table", ROOT / "scripts" / "pages" / "flag_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run python scripts/pages/flag_table.py"
