"""What the README says of the repository is so."""

import re
import runpy

from tests.running import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_file_has_its_line() -> None:
    """Mend with `.venv/bin/python scripts/readme_tree.py`."""
    assert runpy.run_path(str(ROOT / "scripts" / "readme_tree.py"))["with_tree"](README) == README


def test_links_lead_somewhere() -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in target]
    assert len(targets) > 20
    assert [target for target in targets if not (ROOT / target).exists()] == []
