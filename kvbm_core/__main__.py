"""``python -m kvbm_core``: the ``kvbm`` command."""

from kvbm_core.cli.main import run

if __name__ == "__main__":
    run()
