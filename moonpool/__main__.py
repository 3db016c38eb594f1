"""`python -m moonpool`: the same as the `moonpool` command."""

from moonpool.python_path import leave_working_directory

leave_working_directory()

from moonpool.supervision.parent_death import die_with_supervisor  # noqa: E402

die_with_supervisor()

from moonpool.cli import main  # noqa: E402  (before slow imports, during which the supervisor may die)

if __name__ == "__main__":
    main()
