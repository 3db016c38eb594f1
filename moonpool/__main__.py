"""`python -m moonpool`: the same as the `moonpool` command."""

from moonpool.supervision.parent_death import tether_to_supervisor

tether_to_supervisor()

from moonpool.cli import main  # noqa: E402  (the tether comes before slow imports, lest an orphan slip through)

if __name__ == "__main__":
    main()
