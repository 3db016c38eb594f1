"""All attacks on a running cluster, by name."""

from tools.attacks import authorisation, bodies, bombs, floods, kills, raw_http, slow_clients, strangers
from tools.attacks.target import Attack

ATTACKS: dict[str, Attack] = {
    attack.name: attack
    for attack in (
        raw_http.MALFORMED,
        bodies.HOSTILE,
        authorisation.DENIED,
        *bombs.ATTACKS,
        *floods.ATTACKS,
        *slow_clients.ATTACKS,
        *strangers.ATTACKS,
        kills.KILLED,
    )
}
