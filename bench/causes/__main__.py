"""``python -m bench.causes OUT``."""

from bench.causes.runs import main

if __name__ == "__main__":
    main()
