"""``python -m quads_qat`` is ``quads-qat``."""

from quads_qat.cli import main

if __name__ == "__main__":
    main()
