"""``python -m engines`` in tests/ writes docs/engines.md; with ``--measure``, tests/data/engines.csv before that."""

import sys
import tempfile
from pathlib import Path

from engines import table


def main() -> None:
    if "--measure" in sys.argv[1:]:
        from tiny_models import ARCHITECTURES

        from engines.measure import row

        rows = []
        for arch in ARCHITECTURES:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(row(arch, Path(folder)))
        table.write(rows)
    table.PAGE.parent.mkdir(exist_ok=True)
    table.PAGE.write_text(table.page(), "utf-8")


if __name__ == "__main__":
    main()
