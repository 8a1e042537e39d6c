"""One line per file for the README, from the files' own first lines: rewrites that part of README.md, or prints it with --print."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
_FOLDERS = ("actors", "configs", "kernels", "relay", "scripts")
_WIDTH = 138
_BETWEEN = re.compile(r"(<summary>Every file in one line</summary>\n\n```\n).*?(```\n)", re.DOTALL)


def first_line(path: Path) -> str:
    """What a file says of itself; empty where it says nothing."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    found = re.search(
        r"^\s*(?://|/\*+|\*) *(.+?)(?: *\*/)?$" if path.suffix in (".cpp", ".h", ".cu", ".cuh") else r"^# (.+)$", text, re.MULTILINE
    )
    return found[1] if found else ""


def tree() -> str:
    """Files of our folders that say something, committed or about to be; links, records and what git ignores left out."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *_FOLDERS]
    listed = sorted(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines())
    lines = []
    for name in listed:
        path = ROOT / name
        if path.is_symlink() or not path.is_file() or name.startswith("scripts/measured/"):
            continue
        text = first_line(path)
        line = f"{name}  {text}"
        if text:
            lines.append(line if len(line) <= _WIDTH else line[: _WIDTH - 2].rsplit(" ", 1)[0] + " ...")
    return "\n".join(lines) + "\n"


def with_tree(readme: str) -> str:
    return _BETWEEN.sub(lambda match: match[1] + tree() + match[2], readme)


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(tree())
    else:
        path = ROOT / "README.md"
        path.write_text(with_tree(path.read_text(encoding="utf-8")), encoding="utf-8")
