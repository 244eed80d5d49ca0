"""`python -m polyfed` is `polyfed`."""

from polyfed.cli import main

if __name__ == "__main__":
    main()
