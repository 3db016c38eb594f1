"""The lock under which checks import packages that only some of them need, as late as they do.

Checks run at once, each on a thread of its own, and the modules of `messenger` import one another: two threads that
enter the package at different modules would each wait for what the other has begun.
"""

import threading
from typing import Final

ONE_AT_A_TIME: Final = threading.Lock()
