"""`python -m dali_pipes` is the command `dali-pipes`."""

from dali_pipes.tools.cli import app

if __name__ == "__main__":
    app(prog_name="dali-pipes")
