"""Convert a Hugging Face checkpoint: `jaxinfer convert` under a script's name, for use from a checkout."""

import sys

from jaxinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
