"""`python -m moonpool`: the same as the `moonpool` command."""

from moonpool.python_path import leave_working_directory

leave_working_directory()

from moonpool.supervision.parent_death import SUPERVISOR_VARIABLE, die_with_supervisor  # noqa: E402

die_with_supervisor()

if __name__ == "__main__":  # slow imports come after that, since the supervisor may die during them
    import os
    import sys

    if os.environ.get(SUPERVISOR_VARIABLE):
        from moonpool.role_process.supervised import run_supervised

        run_supervised(sys.argv[1:])
    from moonpool.cli import main

    main()
