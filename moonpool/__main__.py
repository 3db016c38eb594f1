"""`python -m moonpool`: the same as the `moonpool` command."""

from moonpool.supervision.parent_death import die_with_supervisor

die_with_supervisor()

from moonpool.cli import main  # noqa: E402  (before slow imports, during which the supervisor may die)

if __name__ == "__main__":
    main()
