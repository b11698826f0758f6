"""`python -m dali_pipes` is the command `dali-pipes`."""

from dali_pipes.cli import app

if __name__ == "__main__":
    app(prog_name="dali-pipes")
