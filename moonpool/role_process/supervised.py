"""Start of a role by its supervisor: `moonpool ROLE --config FILE` without the command line.

The command line's imports would take half a second of CPU in every process of a cluster, at each start.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moonpool.config import all_settings, load
from moonpool.errors import ConfigError, MoonpoolError
from moonpool.role_process.roles import ROLES, run_and_exit
from moonpool.supervision.child import INTERNAL_VARIABLES
from settings.keys import InvalidSetting


def run_supervised(arguments: Sequence[str]) -> None:
    """Run the role that the arguments name, and exit; return if they are not those of a supervised start."""
    role = next((each for each in ROLES if [each.command, "--config"] == list(arguments[:2])), None)
    if role is None or len(arguments) != 3:
        return
    try:
        config: Any = load(
            role.composite,
            flags={},
            environ=os.environ,
            config_file=Path(arguments[2]),
            known=all_settings(),
            reserved_variables=INTERNAL_VARIABLES,
        )
        run_and_exit(role, config)
    except (MoonpoolError, InvalidSetting) as error:
        print(f"Error: {error}", file=sys.stderr, flush=True)
        sys.exit(getattr(error, "exit_code", ConfigError.exit_code))
